"""A hook of MkDocs: what stands in the pages as the repository needs it, as the site needs it.

Pages are written to be read in the repository, too. So those of its root are outside of docs/,
links lead from file to file and are called by the file's name, and a `|` within a table is
escaped."""

import re
from pathlib import Path

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[2]
# The pages of the root, and where they are in the site.
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}


def on_files(files, config):
    """Adds the pages of the root to those of docs/."""
    for name, page in PAGES.items():
        text = re.sub(r"(\]\()docs/", r"\1", (ROOT / name).read_text())
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown, page, files, **_):
    for name, ours in PAGES.items():
        markdown = re.sub(rf"\]\((\.\./)?{re.escape(name)}(?=[)#])", f"]({ours}", markdown)
    markdown = re.sub(
        r"\[[\w/.-]+\.md\]\((?P<target>[\w/.-]+\.md)(?P<anchor>#[\w-]+)?\)",
        lambda link: named_by_title(link, page, files),
        markdown,
    )
    return re.sub(r"^\|.*$", unescaped, markdown, flags=re.M)


def named_by_title(link, page, files):
    """The same link, called as the page is that it leads to."""
    path = (Path(page.file.src_uri).parent / link["target"]).as_posix()
    target = files.get_file_from_path(re.sub(r"^reference/\.\./", "", path))
    if target is None:  # MkDocs says so
        return link[0]
    title = re.search(r"^# (.*)", target.content_string, re.M)[1]
    return f"[{title}]({link['target']}{link['anchor'] or ''})"


def unescaped(row):
    """A row of a table whose code has `|` in place of `\\|`, which GitHub asks for."""
    return re.sub(r"`[^`]*`", lambda code: code[0].replace(r"\|", "|"), row[0])
