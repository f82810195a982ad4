"""The site as its readers open it, from disk: tests/site.sh runs this behind the build.

Every page, on a screen and on a phone: nothing is complained about, no other server is asked, and
nothing is wider than the screen but what scrolls by itself. One page is searched, and one is read
in the dark."""

import shutil
import sys
from pathlib import Path

try:
    from playwright.sync_api import sync_playwright
except ModuleNotFoundError:
    sync_playwright = None

SITE = Path(__file__).parents[1] / "build/site"
BACKGROUND = "getComputedStyle(document.body).backgroundColor"


def problems(browser, width):
    said = []
    tab = browser.new_page(viewport={"width": width, "height": 800})
    tab.on("console", lambda message: message.type == "error" and said.append(message.text))
    tab.on("pageerror", lambda error: said.append(str(error)))
    tab.on("request", lambda r: r.url.startswith(("file:", "data:", "blob:")) or said.append(r.url))
    for page in sorted({*SITE.rglob("*.html")} - {SITE / "404.html"}):  # which is a server's
        tab.goto(page.as_uri())
        wide = tab.evaluate("document.documentElement.scrollWidth")
        said += [f"is {wide} pixels wide"] * (wide > width)
        yield from (f"{page.relative_to(SITE)} at {width}: {what}" for what in said)
        said.clear()
    tab.close()


def finds(browser, word):
    tab = browser.new_page(viewport={"width": 1400, "height": 800})
    tab.goto((SITE / "index.html").as_uri())
    for _ in range(30):  # what is typed before the index is read is not looked for
        tab.fill(".md-search__input", "")
        tab.type(".md-search__input", word)
        tab.wait_for_timeout(1000)
        if tab.query_selector(".md-search-result__item a"):
            break
    return tab.inner_text(".md-search-result__list")


def background(browser, scheme):
    tab = browser.new_page(color_scheme=scheme)
    tab.goto((SITE / "index.html").as_uri())
    return tab.evaluate(BACKGROUND)


def main():
    program = shutil.which("chromium") or shutil.which("google-chrome")
    if sync_playwright is None or program is None:
        print("The site was not opened: there is no playwright, or no chromium")
        return 0
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=program, args=["--no-sandbox"])
        found = [*problems(browser, 400), *problems(browser, 1400)]
        if "softcap" not in finds(browser, "softcap").lower():
            found.append("a search for softcap does not find it")
        if background(browser, "light") == background(browser, "dark"):
            found.append("it is as light in the dark")
        browser.close()
    print(*found, sep="\n", end="\n" if found else "")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
