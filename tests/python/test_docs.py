"""The Python of our pages runs as it is written; files that prose and comments name exist."""

import inspect
import itertools
import re
import runpy
import shutil
from pathlib import Path

import pytest
from common import assert_example_runs

import qkv
from benchmarks.entry import Promise
from benchmarks.suites import SUITES
from benchmarks.tables import label

ROOT = Path(__file__).parents[2]
EVERY_PAGE = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
PAGES = [str(p.relative_to(ROOT)) for p in EVERY_PAGE if "```python" in p.read_text()]


# The packages that the examples of a page are about.
NEEDS = {
    "docs/adopt.md": ["transformers"],
    "docs/cpp.md": ["onnxscript", "onnxruntime"],
}


@pytest.mark.parametrize("page", PAGES)
def test_examples_run(page):
    """The examples of a page run one after the other, in one namespace, as a reader would type
    them."""
    for name in NEEDS.get(page, ()):
        pytest.importorskip(name)
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(), re.S | re.M)
    assert blocks
    names = {}
    for block in blocks:
        exec(compile(block, page, "exec"), names)


def test_pages_are_found():
    assert {"README.md", "docs/options.md"} <= {*PAGES}


def tables(text):
    """Yields (titles, rows) of each table, all of them lists of cells."""
    for table in re.findall(r"(?:^\|.*\|\n)+", text, re.M):
        titles, _, *rows = (
            [cell.strip() for cell in x.split("|")[1:-1]] for x in table.split("\n")[:-1]
        )
        yield titles, rows


def promised_of(entry, titles, row):
    """What the benchmark promises of a row: of its direction, in float32."""
    cells = dict(zip(titles, row, strict=True))
    if cells.get("dtype", "float32") != "float32":
        return Promise()
    direction = {label(d): d for d in entry.promised}.get(cells.get("derivative", label("both")))
    return entry.promised.get(direction, Promise())


def test_the_benchmarks_page_has_every_suite_and_its_promises():
    """A figure that misses its promise has an exclamation mark, and no other has, but for one that
    equals it as far as it is printed."""
    page = (ROOT / "docs/benchmarks.md").read_text()
    entries = {e.name: e for name in ("options", "derivatives") for e in SUITES[name].entries}
    assert all(f"--suite {name}" in page for name in SUITES)
    checked = 0
    for titles, rows in tables(page):
        at = [i for i, title in enumerate(titles) if title.endswith("promised")]
        for row, i in itertools.product(rows if len(at) == 2 else (), at):
            promise = promised_of(entries[row[0]], titles, row)
            bound, sign = (promise.at_least, "≥") if i == at[0] else (promise.at_most, "≤")
            figure = re.match(r"\*\*([\d.]+)", row[i - 1])
            if not bound or not figure:
                assert row[i] == ""
                continue
            over = (float(figure[1]) - bound) * (1 if sign == "≥" else -1)
            marks = [mark for mark, is_fit in (("", over >= 0), (" !", over <= 0)) if is_fit]
            assert row[i] in [f"{sign} {bound:g}{mark}" for mark in marks], row
            checked += 1
    assert checked > 10


ROOMS = ("benchmarks", "cmake", "csrc", "docs", "examples", "release", "tests", "torch_ext")
FILE_NAME = r"(?<![\w./*<>{}-])((?:[\w.-]+/)*[\w-]+\.(?:cpp|h|py|sh|md|cmake))(?![\w/*.])"


def prose():
    """Yields (file, text) for each page, and for the comments of each C++ file."""
    for page in EVERY_PAGE:
        yield page, page.read_text()
    for room in ("csrc", "torch_ext", "tests"):
        for file in (*(ROOT / room).rglob("*.cpp"), *(ROOT / room).rglob("*.h")):
            yield file, "\n".join(re.findall(r"^(?!#).*//(.*)", file.read_text(), re.M))


@pytest.mark.skipif(not (ROOT / "csrc").exists(), reason="no sources here")
def test_named_files_exist():
    """Files are named by their path, or by the end of it: `score.h`, `kernels/score/score.h`."""
    files = [f for room in ROOMS for f in (ROOT / room).rglob("*.*")] + [*ROOT.glob("*.*")]
    paths = ["/" + str(f.relative_to(ROOT)) for f in files]
    gone = [
        f"{where.relative_to(ROOT)}: {name}"
        for where, text in prose()
        for name in re.findall(FILE_NAME, text)
        if not any(path.endswith("/" + name.removeprefix("../")) for path in paths)
    ]
    assert not gone


@pytest.mark.skipif(not (ROOT / "csrc").exists(), reason="no sources here")
@pytest.mark.parametrize("repository", ["", "https://example.org/qkv"])
def test_links_of_the_description_for_pypi(repository, tmp_path, monkeypatch):
    """They are absolute where pyproject.toml names the repository, and none where it does not."""
    setuptools = pytest.importorskip("setuptools")
    (tmp_path / "torch_ext/qkv").mkdir(parents=True)
    for name in ("setup.py", "README.md", "torch_ext/qkv/version.py"):
        shutil.copy(ROOT / name, tmp_path / name)
    pyproject = (ROOT / "pyproject.toml").read_text()
    named = re.sub('^repository = ".*"', f'repository = "{repository}"', pyproject, flags=re.M)
    (tmp_path / "pyproject.toml").write_text(named)
    said = {}
    monkeypatch.setattr(setuptools, "setup", said.update)
    runpy.run_path(str(tmp_path / "setup.py"))
    links = re.findall(r"\]\((.*?)\)", said["long_description"])
    assert bool(links) == bool(said["project_urls"]) == bool(repository)
    assert all(re.match("https://example.org/qkv/blob/v[0-9.]+/[a-zC]", link) for link in links)
    assert "docs/install.md" in said["long_description"]


@pytest.mark.skipif(not (ROOT / "csrc").exists(), reason="no sources here")
def test_messages_of_the_page_are_those_of_the_sources():
    """Of each message in docs/faster.md, what stands between two names or numbers is found."""
    files = [f for room in ("csrc", "torch_ext") for f in (ROOT / room).rglob("*.*")]
    files = [
        f
        for f in [*files, ROOT / "setup.py", ROOT / "preflight.py"]
        if f.suffix in (".cpp", ".h", ".py")
    ]
    strings = re.sub(r'"\s*,?\n?\s*f?"', "", "\n".join(f.read_text() for f in files))
    page = (ROOT / "docs/faster.md").read_text().partition("\n## Error messages\n")[2]
    messages = re.findall("^[|] `(.*?)`", page, re.M)
    parts = [part.strip(" ,;") for message in messages for part in message.split("…")]
    assert len(messages) > 10
    assert [part for part in parts if part not in strings] == []


def functions():
    """The public functions, but for those that ask for a setting or set it."""
    every = (getattr(qkv, name) for name in qkv.__all__)
    return [f for f in every if inspect.isfunction(f) and len(inspect.signature(f).parameters) > 1]


@pytest.mark.parametrize("function", functions(), ids=lambda function: function.__name__)
def test_help_shows_an_example_that_runs_and_the_source(function):
    assert_example_runs(function)
    assert re.search(r"^ *Sources?: ", function.__doc__, re.M)
