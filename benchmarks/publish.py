"""python -m benchmarks.publish FILE.json: prints a run of benchmarks/results into the pages that
name it above their tables."""

import re
import sys
from pathlib import Path

from . import compare, generation
from .models import __main__ as models
from .peers import __main__ as peers
from .processes import ROOT
from .suites import SUITES
from .tables import markdown

RESULTS = ROOT / "benchmarks" / "results"
PAGES = [ROOT / "docs" / name for name in ("benchmarks.md", "compare.md")]
RENDER = {suite.name: suite.tables for suite in SUITES.values()}
RENDER |= {"generation": generation.tables, "models": models.tables, "peers": peers.tables}
TABLE = re.compile(r"((?:^\|.*\|\n)+)", re.M)
NAME = r"`benchmarks/results/([\w.-]+\.json)`"


def rendered(path):
    """The tables of a run, as a page has them. Raises ValueError if the file is none."""
    run = compare.read(path, RENDER, "FILE.json")
    return TABLE.findall(markdown(run, RENDER[run["suite"]](run)) + "\n")


def parts(page):
    """[text, table, text, ...]"""
    return TABLE.split(page)


def named(above):
    """The files that are named between a table and the table or heading above it."""
    return re.findall(NAME, re.split(r"^#.*", above, flags=re.M)[-1])


def published(page, path):
    """The page with the tables of this run in place of those that it has of this file, which may be
    some of them, in their order. Raises ValueError where the run has none with these titles."""
    found, new = parts(page), iter(rendered(path))
    for i in range(1, len(found), 2):
        if named(found[i - 1]) == [path.name]:
            titles = found[i].partition("\n")[0]
            table = next((x for x in new if x.startswith(titles)), None)
            if table is None:
                raise ValueError(f"{path.name} has no table {titles}")
            found[i] = table
    return "".join(found)


def main(paths):
    """Returns the exit status, or why it failed."""
    try:
        for page in PAGES:
            for path in paths:
                page.write_text(published(page.read_text(), Path(path)))
    except ValueError as error:
        return str(error)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
