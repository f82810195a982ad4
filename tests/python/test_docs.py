"""The Python of our pages runs as it is written; files that prose and comments name exist."""

import inspect
import re
from pathlib import Path

import pytest
from common import assert_example_runs

import qkv

ROOT = Path(__file__).parents[2]
EVERY_PAGE = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
PAGES = [str(p.relative_to(ROOT)) for p in EVERY_PAGE if "```python" in p.read_text()]


@pytest.mark.parametrize("page", PAGES)
def test_examples_run(page):
    """The examples of a page run one after the other, in one namespace, as a reader would type
    them."""
    if page == "docs/adopt-transformers.md":
        pytest.importorskip("transformers")
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(), re.S | re.M)
    assert blocks
    names = {}
    for block in blocks:
        exec(compile(block, page, "exec"), names)


def test_pages_are_found():
    assert {"README.md", "docs/options.md"} <= {*PAGES}


def test_the_readme_has_the_figures_of_the_benchmarks():
    """Those that its table has, which are times as fast as torch."""
    rows = re.findall(r"^\|.*\|(.*\|.*)\|$", (ROOT / "README.md").read_text(), re.M)
    figures = {figure for cells in rows for figure in re.findall(r"\b\d+\.\d\d\b", cells)}
    measured = re.findall(r"\*\*([\d.]+)~?\*\*", (ROOT / "docs/benchmarks.md").read_text())
    assert len(figures) > 10 and figures <= {*measured}


ROOMS = ("cmake", "csrc", "docs", "examples", "release", "tests", "torch_ext")
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


def functions():
    """The public functions, but for those that ask for a setting or set it."""
    every = (getattr(qkv, name) for name in qkv.__all__)
    return [f for f in every if inspect.isfunction(f) and len(inspect.signature(f).parameters) > 1]


@pytest.mark.parametrize("function", functions(), ids=lambda function: function.__name__)
def test_help_shows_an_example_that_runs_and_the_source(function):
    assert_example_runs(function)
    assert re.search(r"^ *Sources?: ", function.__doc__, re.M)
