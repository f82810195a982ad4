"""Published tables have the figures of the raw runs that the page names, in benchmarks/results."""

import contextlib
import io
import re

import pytest
from test_docs import tables

from benchmarks import __main__ as bench
from benchmarks import publish


def named(page):
    """Yields (names of files, (titles, rows)) of each table of the page."""
    found = publish.parts(page)
    for above, table in zip(found[::2], found[1::2], strict=False):
        yield publish.named(above), next(tables(table))


def is_of(shown, whole):
    """Whether a table is `whole` or some of its columns, in their order, with every row."""
    (titles, rows), (all_titles, all_rows) = shown, whole
    at = []
    for title in titles:
        begin = at[-1] + 1 if at else 0  # two columns may have one title
        if title not in all_titles[begin:]:
            return False
        at.append(all_titles.index(title, begin))
    return rows == [[row[i] for i in at] for row in all_rows]


def wrong(page, folder):
    """What is wrong with the tables of the page that name files of the folder."""
    for names, shown in named(page):
        if missing := [name for name in names if not (folder / name).exists()]:
            yield f"there is no {', '.join(missing)}"
        elif names and not any(
            is_of(shown, next(tables(x))) for n in names for x in publish.rendered(folder / n)
        ):
            yield f"{', '.join(names)}: another table than below {shown[0]}"


@pytest.mark.parametrize("page", publish.PAGES, ids=lambda page: page.name)
def test_published_tables_have_the_figures_of_their_runs(page):
    assert list(wrong(page.read_text(), publish.RESULTS)) == []


def test_a_page_is_as_its_run_is_printed_into_it():
    page = publish.PAGES[1].read_text()
    assert publish.published(page, publish.RESULTS / "peers-zen4.json") == page


def test_what_is_no_run_is_not_published(tmp_path):
    path = tmp_path / "run.json"
    assert publish.main([path]) == f"FILE.json: {path} cannot be read: No such file or directory"


def test_every_run_is_published_and_described():
    """A page names it, and the README beside it says when, where and how it was measured."""
    described = (publish.RESULTS / "README.md").read_text()
    pages = "".join(page.read_text() for page in publish.PAGES)
    for path in publish.RESULTS.glob("*.json"):
        if not path.name.startswith("models-"):  # docs/models.md is all of it
            assert re.search(re.escape(f"`benchmarks/results/{path.name}`"), pages)
        row = re.search(rf"^\| `{re.escape(path.name)}` \|(.*)$", described, re.M)
        assert row and re.search(r"\| *\d{4}-\d\d-\d\d *\|.*`python -m ", f"|{row[1]}"), path.name


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """A folder with a run, and a page with its tables."""
    folder = tmp_path_factory.mktemp("results")
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as page:
        patch.delenv("QKV_ISA", raising=False)
        arguments = ["--suite", "grid", "--shapes", "1x2x6x5x4c,1x2x1x5x4"]
        assert (
            bench.main(
                [*arguments, "--repeats", "1", "--markdown", "--json", str(folder / "run.json")]
            )
            == 0
        )
    return folder, f"# Here\n\nOf `benchmarks/results/run.json`:\n\n{page.getvalue()}"


@pytest.mark.long
def test_a_page_that_is_printed_from_the_run_is_right(published):
    folder, page = published
    assert [names for names, _ in named(page)] == [["run.json"], []]
    assert list(wrong(page, folder)) == []
    both = page.replace("One query a head", "`benchmarks/results/run.json`. One query a head")
    assert [names for names, _ in named(both)] == [["run.json"]] * 2
    assert list(wrong(both, folder)) == []


@pytest.mark.long
def test_a_run_is_printed_into_its_page_again(published):
    folder, page = published
    page = page.replace("One query a head", "`benchmarks/results/run.json`. One query a head")
    changed = re.sub(r"\*\*(\d)", r"**9\1", page) + "\n| a |\n|---|\n| **1** |\n"
    assert publish.published(changed, folder / "run.json").startswith(page)
    first = page.partition("One query a head")[0]
    assert publish.published(first, folder / "run.json") == first
    with pytest.raises(ValueError, match="run.json has no table [|] shapes"):
        publish.published(page.replace("| shape ", "| shapes "), folder / "run.json")


@pytest.mark.long
def test_columns_may_be_left_out_but_no_row(published):
    folder, page = published
    (titles, rows) = next(tables(page))
    kept = [titles.index(x) for x in ("shape", "pass", "× torch (IQR)")]

    def shown(rows):
        lines = [[row[i] for i in kept] for row in (titles, titles, *rows)]
        table = "".join(f"| {' | '.join(cells)} |\n" for cells in lines)
        return f"`benchmarks/results/run.json`\n\n{table}"

    assert list(wrong(shown(rows), folder)) == []
    assert list(wrong(shown(rows[1:]), folder)) != []


@pytest.mark.long
@pytest.mark.parametrize(
    "change, message",
    [
        (lambda page: re.sub(r"\*\*(\d)", r"**9\1", page, count=1), "run.json: another table"),
        (lambda page: page.replace("run.json", "gone.json"), "there is no gone.json"),
        (lambda page: page.replace("torch's ms", "theirs"), "run.json: another table"),
    ],
)
def test_what_is_not_of_the_run_is_found(published, change, message):
    folder, page = published
    (said,) = wrong(change(page), folder)
    assert said.startswith(message)


@pytest.mark.long
def test_a_heading_ends_what_was_named(published):
    folder, page = published
    text = "`benchmarks/results/gone.json`\n\n## Next\n\n| a |\n|---|\n| 1 |\n"
    assert [names for names, _ in named(text)] == [[]]
