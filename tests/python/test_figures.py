"""Every figure of README and docs/ can be traced to where it was measured.

A figure is a decimal, a number with a unit, or a number in a cell of numbers. It stands at a place:
a page and a heading. The figures of a place are one of these:

- cells of raw runs, or of another page's table, or no measurements: figures.toml names them;
- measured once, without a raw run: a row of that table in benchmarks/results/README.md says where
  and when, and has a digest of these figures, so that none of them changes without its row;
- tables below the name of a raw run, which test_bench_results.py holds, and docs/models.md, which a
  program prints (test_models_tried.py)."""

import hashlib
import itertools
import json
import re
from collections import defaultdict
from functools import cache

import pytest
from test_docs import tables

from benchmarks.publish import NAME, RESULTS, ROOT, rendered

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    import tomli as tomllib

DOCS = ROOT / "docs"
NOT_OURS = {"models.md", "release.md"}  # printed by a program; versions and sizes of files
MEASURED = tomllib.loads((ROOT / "tests/python/figures.toml").read_text())

UNITS = (
    "%|ms|µs|ns|s|seconds?|microseconds?|nanoseconds?|[KMG]i?B(?:/s)?|[GT]FLOP/s|Gbit/s|cycles?|times"
    "|tokens a second|ulp"
)
NUMBER = r"\d+(?:,\d{3})*(?:\.\d+)?(?:e-?\d+)?"
FIGURE = rf"(?<![\w.^×/-])(\d+\.\d+(?:e-?\d+)?|{NUMBER}(?=\s*(?:{UNITS})(?!\w)))"
VERSIONS = (
    r"(?:torch|Python|transformers|timm|diffusers|vLLM|onnxruntime|ONNX Runtime|OpenVINO|glibc|GCC|"
    r"FlashAttention|xFormers|IPEX|zentorch|arXiv|qkv)\s(?:from\s)?\d[\d.]*(?:(?:,|\sto|\sand|\sor)\s\d+\.\d+)*"
)
TABLE = r"((?:^\|.*\|\n)+)"


def slug(heading):
    """As GitHub makes an anchor of a heading."""
    return re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")


def without_code(text):
    """Nor what links lead to, numbers of issues and versions of programs."""
    text = re.sub(r"^```.*?^```|^    .*?$", "", text, flags=re.M | re.S)
    text = re.sub(r"`[^`\n]*`|\]\([^)]*\)|#\d+", "", text)
    return re.sub(VERSIONS, "", text)


def of_cell(cell):
    """The numbers of a cell that has nothing else; else what prose would have."""
    words = re.sub(rf"{NUMBER}|\b(?:to|and|times|more)\b|{UNITS}", "", cell)
    return re.findall(FIGURE if re.search(r"[a-zA-Z]", words) else NUMBER, cell)


def figures(text):
    """Of prose and tables, in their order, without the titles of columns."""
    for part in re.split(TABLE, without_code(text), flags=re.M):
        if part.startswith("|"):
            for row in part.splitlines()[2:]:
                for cell in row.split("|"):
                    yield from of_cell(cell)
        else:
            yield from re.findall(FIGURE, part)


def sections(page):
    """Yields (anchor, text), without tables below the name of a raw run."""
    for part in re.split(r"^(?=#+ )", page, flags=re.M):
        heading = re.match(r"#+ (.*)", part)
        above, *rest = re.split(TABLE, part, flags=re.M)
        kept = [above]
        for table, below in zip(rest[::2], rest[1::2], strict=True):
            kept += [below] if re.search(NAME, above) else [table, below]
            above = below
        if heading:
            yield slug(heading[1]), "".join(kept)


@cache
def places():
    """{page#anchor: its figures}"""
    found = defaultdict(list)
    for path in (ROOT / "README.md", *sorted(DOCS.rglob("*.md"))):
        if path.name not in NOT_OURS:
            for anchor, text in sections(
                re.sub(r"^```.*?^```", "", path.read_text(), flags=re.M | re.S)
            ):
                found[f"{path.name}#{anchor}"] += figures(text)
    return {place: numbers for place, numbers in found.items() if numbers}


def once():
    """{page#anchor: (row, digest)} of the table of what was measured once."""
    text = (RESULTS / "README.md").read_text().partition("\n## Measured once\n")[2]
    (table,) = tables(text)
    rows = {row[0].partition("](")[2].rpartition("/")[2].rstrip(")"): row for row in table[1]}
    assert len(rows) == len(table[1]), "two rows are about the same place"
    return rows


def digest(numbers):
    return hashlib.sha256(" ".join(numbers).encode()).hexdigest()[:8]


@cache
def every_table(name):
    """Of a raw run, or of a place of a page."""
    if name.endswith(".json"):
        return [next(tables(table)) for table in rendered(RESULTS / name)]
    page, _, anchor = name.partition("#")
    return list(tables(dict(sections((DOCS / page).read_text()))[anchor]))


def cell(name):
    """The first number of "run or place | number of the table | cells of the row; ... | title"; a
    title that stands in several columns ends with /1 for the second."""
    source, number, row, title = (part.strip() for part in name.split(" | "))
    titles, rows = every_table(source)[int(number)]
    (found,) = [x for x in rows if {part.strip() for part in row.split(";")} <= {*x}]
    title, _, nth = title.partition(" /")
    at = [i for i, other in enumerate(titles) if other == title][int(nth or 0)]
    return re.search(NUMBER, found[at])[0]


def each(name):
    """A name for each choice of {one|another}, the last one changing first."""
    fixed, *rest = re.split(r"\{(.*?)\}", name)
    for chosen in itertools.product(*(x.split("|") for x in rest[::2])):
        yield fixed + "".join(x + y for x, y in zip(chosen, rest[1::2], strict=True))


def resolved(names, numbers):
    """What the names say each of the numbers should be, and what is left for a row of what was
    measured once."""
    expected, left = [], []
    for name in itertools.chain.from_iterable(map(each, names)):
        if kept := re.fullmatch(r"once(?: x (\d+))?", name):
            taken = numbers[len(expected) :][: int(kept[1] or 1)]
            expected += taken
            left += taken
        elif literal := re.match(rf"= ({NUMBER}): \w", name):  # and why it is no measurement
            expected.append(literal[1])
        else:
            expected.append(cell(name))
    return expected, left


def test_every_figure_has_a_source():
    known, wrong = once(), []
    for place, numbers in places().items():
        expected, left = numbers, numbers
        if place in MEASURED:
            expected, left = resolved(MEASURED[place], numbers)
        if numbers != expected:
            at = [n for n, (x, y) in enumerate(zip(numbers, expected)) if x != y][:1]  # noqa: B905
            said = [f"figure {n}, {numbers[n]}, is {expected[n]} by figures.toml" for n in at]
            wrong.append(f"{place}: {(said or ['more figures than figures.toml, or fewer'])[0]}")
        elif left and place not in known:
            wrong.append(f"{place} has {left}: no raw run, no row, digest {digest(left)}")
        elif left and known[place][-1] != f"`{digest(left)}`":
            wrong.append(f"{place}: other figures than its row is of, digest {digest(left)}")
    assert not wrong, "\n".join(wrong)


def test_nothing_is_named_that_is_gone():
    assert {*MEASURED} <= {*places()}
    assert {*once()} <= {*places()}


def test_rows_say_where_and_when():
    for place, (_, date, commit, machine, command, _) in once().items():
        assert re.fullmatch(r"\d{4}-\d\d-\d\d", date), place
        assert re.fullmatch(r"`[0-9a-f]{7,}`", commit), place
        assert machine and command, place


@pytest.mark.parametrize(
    "text, found",
    [
        ("1.5 to 2 times, 64 keys, 17 MB of `9 MB`, torch 2.13 or 2.14", "1.5 2 17"),
        ("| a |\n|--:|\n| 8 heads |\n| **3.1~** (0.2) |\n| 7, 12 ms |\n", "3.1 0.2 7 12"),
    ],
)  # fmt: skip
def test_what_a_figure_is(text, found):
    assert [*figures(text)] == found.split()


def test_the_errors_of_the_raw_runs_are_counted():
    """In docs/semantics.md's table, by kinds of runs, and in the sentence above it, of all."""
    page = (DOCS / "semantics.md").read_text()
    every = []
    (table,) = [rows for titles, rows in tables(page) if titles[0] == "raw runs of"]
    for runs, *numbers in table:
        files = [f for kind in re.findall("`(.*?)`", runs) for f in RESULTS.glob(kind)]
        checks = [x["check"] for f in files for x in json.loads(f.read_text())["results"]]
        found = [(e["error"], e["torch_error"]) for check in checks for e in check.values()]
        every += found
        larger = [sum(ours > factor * torchs for ours, torchs in found) for factor in (1, 1.15)]
        at_most = max(ours / torchs for ours, torchs in found if torchs)
        assert numbers == [*map(str, (len(found), *larger)), f"{at_most:.2f}"], runs
    files = {*RESULTS.glob("*.json")} - {*RESULTS.glob("steps-*.json")}  # which are of models
    assert sum(f.read_text().count('"torch_error"') for f in files) == len(every)
    larger = [sum(ours > factor * torchs for ours, torchs in every) for factor in (1, 1.15)]
    assert f"in {larger[0]} of the {len(every)} results" in page
    assert f"in {larger[1]} of them by more than 15 %" in page
