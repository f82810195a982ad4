"""python -m benchmarks --suite options."""

import contextlib
import io
import json

import pytest
from bench_runs import PNG, TENSORS, leave_out_compiled, make_up_rates, markdown_rows, tables_of

from benchmarks import __main__ as benchmarks
from benchmarks import options
from benchmarks.options import drawn, equal_documents, parse
from benchmarks.suites import SUITES
from benchmarks.tables import broken, markdown, promise
from qkv.bench.measure import MIN_REPEATS, quartiles


def test_options_are_the_promised_ones():
    entries = SUITES["options"].entries
    assert all(set(e.promised) == {"both"} for e in entries)
    promised = [e.promised["both"] for e in entries]
    assert [
        f"{e.name} {e} {p.at_least} {p.at_most}" for e, p in zip(entries, promised, strict=True)
    ] == [
        "plain 2x8x1024x1024x64 None None",
        "dropout dropout:2x8x1024x1024x64 5 1.35",
        "bias bias:2x8x1024x1024x64 2.5 None",
        "bias-padded bias-padded:2x8x1024x1024x64 None 1.1",
        "dv96 2x8x1024x1024x64x96 2.5 None",
        "dv96-padded plain-padded:2x8x1024x1024x64x96 None None",
        "padding padding:8x8x1024x1024x64 None 0.8",
        "mask mask:2x8x1024x1024x64 None 1.15",
        "softcap softcap:2x8x1024x1024x64 None 1.3",
        "alibi alibi:2x8x1024x1024x64 None 1.1",
        "slopes slopes:2x8x1024x1024x64 None None",
        "sinks sinks:2x8x1024x1024x64 None 1.1",
        "sinks-key sinks-key:2x8x1024x1024x64 None None",
        "weights weights:2x8x1024x1024x64 None 1.25",
        "window8k window:1x8x8192x8192x64c 8 None",
        "window8k-cut window-cut:1x8x8192x8192x64c None None",
        "window32k growth:1x8x32768x32768x64c None 4.4",
        "varlen varlen:64x8x1024x1024x64 2 1.25",
        "varlen-each varlen-each:64x8x1024x1024x64 None None",
    ]
    base = {e.name: f"{e.base.name}, {e.base}" for e in entries if e.base}
    assert base["dropout"] == "plain, 2x8x1024x1024x64"
    assert base["bias-padded"] == "bias, bias:2x8x1024x1024x64"
    assert base["window32k"] == "L / 4, window-alone:1x8x8192x8192x64c"
    assert base["varlen"] == "equal lengths, equal:64x8x585x585x64"


def test_cost_of_options(monkeypatch):
    monkeypatch.setattr(options, "WINDOW", (3, 0))
    pairs = 4 + 4 + 4 + 3 + 2 + 1  # 6 queries, the last 4 keys of each
    assert parse("window:2x4x6x6x8").flops("forward") == 2 * 2 * 4 * pairs * (8 + 8)
    entry = parse("varlen:64x8x1024x1024x64")
    lengths = drawn(entry.shape)
    assert len(lengths) == 64 and min(lengths) >= 16 and max(lengths) <= 1024
    assert entry.flops("forward") == 2 * 8 * sum(n * n for n in lengths) * (64 + 64)
    assert abs(entry.base.flops("both") / entry.flops("both") - 1) < 1 / 585
    assert equal_documents(entry.shape) == entry.base


@pytest.fixture(scope="module")
def finished_options(tmp_path_factory):
    """(stdout, run, bytes of the plot), as in test_bench.py, of two options: one that torch can do
    and that has a base to compare with, and one without either. Without a compiler."""
    folder, printed = tmp_path_factory.mktemp("bench"), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed):
        patch.delenv("QKV_ISA", raising=False)
        make_up_rates(patch)
        leave_out_compiled(patch)
        arguments = ["--suite", "options", "--seconds", "0.01",
                     "--shapes", "sinks:1x2x8x8x4,growth:1x2x8x8x4,varlen:3x2x8x8x4c",
                     "--json", str(folder / "run.json"),
                     "--plot", str(folder / "run.png")]  # fmt: skip
        assert benchmarks.main(arguments) == 0
    run = json.loads((folder / "run.json").read_text())
    return printed.getvalue(), run, (folder / "run.png").read_bytes()


@pytest.mark.long
def test_ways_that_cannot_be_had_are_said(finished_options):
    stdout, run, _ = finished_options
    reason = {"by hand, compiled": "left out of this test"}
    found = [r[d]["skipped"] for r in run["results"] for d in run["directions"]]
    assert found == [reason] * 3 + [{}] * 6
    where = ", ".join(f"sinks:1x2x8x8x4 {d}" for d in run["directions"])
    said = f"by hand, compiled took no part in {where}: left out of this test"
    assert f"\nnote: {said}\n" in stdout
    assert f"\n\nNote: {said}\n" in markdown(run, SUITES["options"].tables(run)) + "\n"


def test_figures_of_options_follow_from_samples(finished_options):
    _, run, _ = finished_options
    assert run["directions"] == ["forward", "backward", "both"]
    sinks, growth, varlen = run["results"]
    assert [(r["option"], r["base"]) for r in run["results"]] == [
        ("sinks", "plain"), ("growth", "L / 4"), ("varlen", "equal lengths")
    ]  # fmt: skip
    assert set(sinks["check"]) == {*TENSORS, "grad_sinks"}
    for result in run["results"]:
        for direction in run["directions"]:
            found = result[direction]
            ours, base = (found[name]["samples_s"] for name in ("qkv", "base"))
            assert len(ours) == len(base) == found["repeats"] >= MIN_REPEATS
            assert found["own_ratio"] == quartiles([q / b for q, b in zip(ours, base, strict=True)])
            assert ("torch" in found) == ("ratio" in found) == bool(found["way"])
            if tried := found["tried_s"]:
                assert found["way"] == min(tried, key=tried.get)
    assert (sinks["both"]["way"], growth["both"]["way"]) == ("by hand", None)
    assert set(varlen["both"]["tried_s"]) == {
        "padded SDPA, bool mask", "padded SDPA, float mask"
    }  # fmt: skip


def test_table_of_options(finished_options):
    stdout, run, _ = finished_options
    [(titles, rows)] = tables_of(stdout)
    for row, result in zip(rows, run["results"], strict=True):
        cells, both = dict(zip(titles, row, strict=True)), result["both"]
        assert cells["own: that of"] == result["base"]
        assert cells["torch's way"] == (both["way"] or "")
        own = cells["forward + backward × own time (IQR)"]
        assert own.startswith(f"{both['own_ratio']['median']:.2f}")
        times = cells["forward + backward × torch (IQR)"]
        assert times.startswith(f"{both['ratio']['median']:.2f}" if "ratio" in both else "")
        assert bool(times) == ("ratio" in both)
    lines = markdown_rows(markdown(run, SUITES["options"].tables(run)))
    assert len(lines) == 2 + 3 and {line.count("|") for line in lines} == {13}


def test_plot_of_options_is_a_picture(finished_options):
    assert finished_options[2].startswith(PNG) and len(finished_options[2]) > 10_000


def test_promises_that_do_not_hold_are_said():
    def result(name, torchs, own, at_least, at_most):
        both = {"ratio": quartiles([torchs]), "own_ratio": quartiles([own])}
        promised = {"both": {"at_least": at_least, "at_most": at_most}}
        return {"name": name, "dtype": "float32", "promised": promised, "both": both}

    run = {
        "results": [
            result("kept", 5, 1.35, 5, 1.35),
            result("slow", 4.9, 1.36, 5, 1.35),
            result("free", 0.1, 9, None, None),
        ],
    }
    assert [*broken(run)] == [
        "slow: not at least 5 times torch's speed, as promised",
        "slow: not at most 1.35 times our own time, as promised",
    ]
    cells = [promise(result, "both", "at_least") for result in run["results"]]
    assert cells == ["≥ 5", "≥ 5 !", ""]
