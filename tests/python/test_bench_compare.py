"""--compare and --from: runs that were written before."""

import contextlib
import io
import json

import pytest
from bench_runs import PNG, make_up_rates, markdown_rows, tables_of

from benchmarks import __main__ as benchmarks

GRID = ["--suite", "grid"]
SHAPES = "1x2x6x5x4c,1x2x1x5x4"


@pytest.fixture(scope="module")
def old(tmp_path_factory):
    """The JSON of a short run; what it prints is looked at elsewhere."""
    path = tmp_path_factory.mktemp("bench") / "old.json"
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()):
        patch.delenv("QKV_ISA", raising=False)
        make_up_rates(patch)
        arguments = [*GRID, "--shapes", SHAPES, "--repeats", "3", "--json", str(path)]
        assert benchmarks.main(arguments) == 0
    return path


@pytest.fixture
def twice(old, tmp_path):
    """The same run, but that ours took twice as long, on a machine of another name."""
    run = json.loads(old.read_text())
    run["machine"]["cpu"] = "Abacus"
    for result in run["results"]:
        for direction in run["directions"]:
            ours = result[direction]["qkv"]
            ours["seconds"] = {name: 2 * x for name, x in ours["seconds"].items()}
            ratio = result[direction]["ratio"]
            result[direction]["ratio"] = {name: x / 2 for name, x in ratio.items()}
    path = tmp_path / "new.json"
    path.write_text(json.dumps(run))
    return path


def printed(capsys, *arguments):
    assert benchmarks.main([*map(str, arguments)]) == 0
    return capsys.readouterr().out


def test_then_and_now_are_set_side_by_side(capsys, old, twice):
    stdout = printed(capsys, "--from", twice, "--compare", old)
    titles, rows = tables_of(stdout)[-1]
    run = json.loads(old.read_text())
    passes = [(r, d) for r in run["results"] for d in run["directions"]]
    assert titles[4:] == ["ms then", "ms now", "now / then",
                          "torch's ms then", "torch's ms now", "torch's now / then",
                          "× torch then", "× torch now"]  # fmt: skip
    for row, (result, direction) in zip(rows, passes, strict=True):
        timing = result[direction]
        assert [row[0], *row[2:4]] == [result["name"], "float32", direction]
        then, now = float(row[4]), float(row[5])
        assert then == pytest.approx(1e3 * timing["qkv"]["seconds"]["median"], rel=0.01)
        assert now == pytest.approx(2 * then, rel=0.02) and row[6] == "2.00"
        assert row[7] == row[8] and row[9] == "1.00"
        ratio = timing["ratio"]["median"]
        assert row[10].strip("~") == f"{ratio:.2f}" and row[11].strip("~") == f"{ratio / 2:.2f}"
    assert "Then and now differ in cpu: only × torch compares." in stdout
    assert "Then and now differ" not in printed(capsys, "--from", old, "--compare", old)


def test_shapes_that_only_one_run_has_are_left_out(capsys, old, twice):
    run = json.loads(twice.read_text())
    run["results"][0]["shape"] = "1x2x6x5x8c"
    twice.write_text(json.dumps(run))
    _, rows = tables_of(printed(capsys, "--from", twice, "--compare", old))[-1]
    assert [row[0] for row in rows] == ["1x2x1x5x4"] * 2


@pytest.mark.usefixtures("no_isa_asked_for")
def test_nothing_in_common_is_said_before_the_run(monkeypatch, capsys, old):
    monkeypatch.setattr("benchmarks.__main__.measured", lambda *_: pytest.fail("measured"))
    with pytest.raises(SystemExit):
        benchmarks.main([*GRID, "--shapes", "tiny", "--compare", str(old)])
    message = capsys.readouterr().err
    assert f"--compare: {old} has none of: plain 64x4x16x16x32 float32. It has: " in message
    assert "plain 1x2x1x5x4 float32; plain 1x2x6x5x4c float32" in message


def test_a_run_is_printed_and_drawn_again(capsys, old, tmp_path):
    benchmarks.main(["--from", str(old), "--markdown", "--plot", str(tmp_path / "run.png")])
    stdout = capsys.readouterr().out
    assert len(markdown_rows(stdout)) == 2 + 2 + 2 + 2 + 2  # each with its titles, and two means
    assert (tmp_path / "run.png").read_bytes().startswith(PNG)


def test_memory_is_shown_where_it_was_measured(capsys, old, tmp_path):
    run = json.loads(old.read_text())
    for direction in run["directions"]:
        run["results"][0][direction]["qkv"]["extra_bytes"] = 3 << 20
        run["results"][0][direction]["torch"]["extra_bytes"] = 70 << 20
    path = tmp_path / "run.json"
    path.write_text(json.dumps(run))
    titles, rows = tables_of(printed(capsys, "--from", path))[0]
    assert titles[-2:] == ["extra MiB", "torch's MiB"]
    assert [row[-2:] for row in rows] == [["3", "70"]] * 2 + [["", ""]] * 2


@pytest.mark.long
@pytest.mark.usefixtures("no_isa_asked_for")
def test_memory_is_measured_when_asked_for(monkeypatch, capsys, tmp_path):
    """In processes of its own, which are left out here: test_bench_derivatives.py has them."""
    asked = []

    def extra_bytes(case, direction, way):
        asked.append((str(case.entry), direction, way))
        return {"qkv": 1 << 20, "torch": 2 << 20}

    monkeypatch.setattr("benchmarks.run.extra_bytes", extra_bytes)
    make_up_rates(monkeypatch)
    stdout = printed(capsys, *GRID, "--shapes", "1x2x4x4x4c", "--repeats", 1, "--memory")
    assert asked == [("1x2x4x4x4c", d, "SDPA") for d in ("forward", "backward")]
    assert [row[-2:] for row in tables_of(stdout)[0][1]][:2] == [["1", "2"]] * 2
