"""python -m benchmarks --suite grid: one run, and what it prints, writes and draws."""

import contextlib
import functools
import io
import json
import math

import pytest
import torch
from bench_runs import PNG, TENSORS, markdown_rows, run_bench, run_program, tables_of

import qkv
from benchmarks import __main__ as benchmarks
from benchmarks import report
from benchmarks.grid import GRID, parse
from benchmarks.tables import markdown
from qkv.bench import machine
from qkv.bench.measure import MIN_REPEATS, quartiles


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """(stdout, run, bytes of the plot) of a short run over three shapes, which measures the machine
    once, where a user's does six times. It is printed again by a process, as users run it."""
    folder, printed = tmp_path_factory.mktemp("bench"), io.StringIO()
    arguments = ["--suite", "grid", "--shapes", "tiny,1x2x8x8x4,2x4/2x1x32x8c", "--seconds", "0.01",
                 "--threads", "2", "--json", str(folder / "run.json")]  # fmt: skip
    threads = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed):
        patch.delenv("QKV_ISA", raising=False)
        patch.setattr(machine, "rates", functools.cache(machine.rates))
        assert benchmarks.main(arguments) == 0
    torch.set_num_threads(threads)
    run = json.loads((folder / "run.json").read_text())
    again = ("--from", folder / "run.json", "--plot", folder / "run.png")
    assert run_program("benchmarks", *again).stdout == printed.getvalue()
    return printed.getvalue(), run, (folder / "run.png").read_bytes()


@pytest.mark.long  # as all that need the run: eight seconds
def test_json_says_everything(finished):
    _, run, _ = finished
    assert (
        run["machine"]
        | {
            "cpu": machine.cpu_model(),
            "threads": 2,
            "isa": qkv.active_isa(),
            "dtype": "float32",
            "torch": torch.__version__,
            "qkv": qkv.__version__,
        }
        == run["machine"]
    )
    assert run["peak"]["read_gbs"] > 0
    assert run["peak"]["gflops"] == max(run["peak"]["gflops_before"], run["peak"]["gflops_after"])
    names = [(r["name"], r["shape"]) for r in run["results"]]
    assert names == [
        ("tiny", "64x4x16x16x32"),
        ("1x2x8x8x4", "1x2x8x8x4"),
        ("2x4/2x1x32x8c", "2x4/2x1x32x8c"),
    ]
    assert run["suite"] == "grid" and run["peak"]["instruction"] == "FMA"
    for result in run["results"]:
        assert result["dtype"] == "float32"
        assert set(result["check"]) == set(TENSORS)
        assert all(e["error"] <= e["limit"] for e in result["check"].values())


@pytest.mark.long
def test_figures_follow_from_samples(finished):
    _, run, _ = finished
    for result in run["results"]:
        entry = parse(result["shape"])
        for direction in ("forward", "backward"):
            flops, found = entry.flops(direction), result[direction]
            assert found["repeats"] >= MIN_REPEATS
            pairs = list(zip(found["torch"]["samples_s"], found["qkv"]["samples_s"], strict=True))
            assert len(pairs) == found["repeats"]
            assert found["ratio"] == quartiles([t / q for t, q in pairs])
            for name in ("qkv", "torch"):
                seconds = found[name]["seconds"]
                assert seconds == quartiles(found[name]["samples_s"])
                assert found[name]["gflops"] == flops / seconds["median"] / 1e9
    for direction, mean in run["geometric_mean"].items():
        ratios = [r[direction]["ratio"]["median"] for r in run["results"][:2]]  # the third decodes
        assert mean == pytest.approx(math.prod(ratios) ** (1 / len(ratios)))


@pytest.mark.long
def test_only_decode_reports_memory_rate(finished):
    _, run, _ = finished
    assert ["gbs" in r["forward"]["qkv"] for r in run["results"]] == [False, False, True]
    assert "gbs" not in run["results"][2]["backward"]["qkv"]
    forward = run["results"][2]["forward"]["qkv"]
    touched = 4 * 8 * (2 * 2 * 2)  # the first key and its value, which are all that it sees
    assert forward["gbs"] == touched / forward["seconds"]["median"] / 1e9


@pytest.mark.long
def test_tables_name_the_machine_and_every_pass(finished):
    stdout, run, _ = finished
    lines = stdout.splitlines()
    assert lines[0].startswith(machine.cpu_model()) and "2 threads" in lines[0]
    assert lines[1].startswith("FMA peak") and "GB/s" in lines[1]
    (titles, rows), (decode_titles, decode_rows) = tables_of(stdout)
    assert "extra MiB" not in titles and len(rows) == 4 + 2 and len(decode_rows) == 2
    found = [dict(zip(titles, row, strict=True)) for row in rows]
    found[4:4] = [dict(zip(decode_titles, row, strict=True)) for row in decode_rows]
    passes = [(r, direction) for r in run["results"] for direction in ("forward", "backward")]
    for cells, (result, direction) in zip(found, passes, strict=False):
        timing = result[direction]
        assert cells["shape"] == result["name"] and cells["pass"] == direction
        sizes = result["shape"].replace("x", "×").replace("c", " causal")
        assert cells["B×Hq/Hkv×L×S×D"] == sizes
        assert float(cells["ms"]) == pytest.approx(1e3 * median(timing, "qkv"), rel=0.01)
        assert float(cells["torch's ms"]) == pytest.approx(1e3 * median(timing, "torch"), rel=0.01)
        assert cells["× torch (IQR)"].startswith(f"{timing['ratio']['median']:.2f}")
        errors = [
            result["check"][x] for x in TENSORS if (x == "output") == (direction == "forward")
        ]
        worst = max(errors, key=lambda e: e["error"] / e["limit"])
        assert cells["error"] == f"{worst['error']:.1e}"
        assert cells["torch's error"] == f"{worst['torch_error']:.1e}"
    for cells, (result, direction) in zip(found[:4], passes, strict=False):
        gflops = result[direction]["qkv"]["gflops"]
        assert cells["GFLOP/s"] == f"{gflops:.0f}"
        assert cells["of peak"] == f"{gflops / run['peak']['gflops']:.0%}"
    assert found[4]["K and V read, GB/s"] == f"{run['results'][2]['forward']['qkv']['gbs']:.1f}"
    for cells, (direction, mean) in zip(found[6:], run["geometric_mean"].items(), strict=True):
        assert [x for x in cells.values() if x] == ["geometric mean", direction, f"{mean:.2f}"]


def median(timing, name):
    return timing[name]["seconds"]["median"]


@pytest.mark.long
def test_markdown_has_two_tables(finished):
    rows = markdown_rows(markdown(finished[1], GRID.tables(finished[1])))
    assert len(rows) == 2 + 4 + 2 + 2 + 2
    assert [row.count("|") for row in rows] == [11] * 8 + [13] * 4
    cells = [x.strip() for x in rows[10].split("|")]
    assert cells[1:4] == ["2x4/2x1x32x8c", "2×4/2×1×32×8 causal", "forward"]
    assert all(row.count("**") == 2 for row in rows[2:8] + rows[10:])


@pytest.mark.long
def test_plot_is_a_picture(finished):
    assert finished[2].startswith(PNG) and len(finished[2]) > 10_000


@pytest.mark.long
@pytest.mark.parametrize("isa", qkv.supported_isas())
def test_isa_holds_torch_likewise(isa, tmp_path):
    done = run_bench(
        "--shapes", "1x1x4x4x4", "--repeats", 1, "--isa", isa, "--json", tmp_path / "run.json"
    )
    assert done.returncode == 0, done.stderr
    run = json.loads((tmp_path / "run.json").read_text())["machine"]
    confined = {"avx2": "AVX2", "generic": "DEFAULT", "neon": "DEFAULT"}
    expected = confined.get(isa, "AVX512")
    assert (run["isa"], run["torch_isa"]) == (isa, expected)


@pytest.mark.long
def test_qkv_isa_in_the_environment_holds_torch_too(tmp_path):
    done = run_bench(
        "--shapes", "1x1x4x4x4", "--repeats", 1, "--json", tmp_path / "run.json", QKV_ISA="generic"
    )
    assert done.returncode == 0, done.stderr
    run = json.loads((tmp_path / "run.json").read_text())
    assert (run["machine"]["isa"], run["machine"]["torch_isa"]) == ("generic", "DEFAULT")
    assert run["results"][0]["forward"]["repeats"] == 1


def test_grid_is_the_promised_one():
    assert [f"{entry.name} {entry}" for entry in GRID.entries] == [
        "vit-s 8x6x197x197x64",
        "bert 8x12x512x512x64",
        "gpt2 4x12x1024x1024x64c",
        "base 1x8x1024x1024x64",
        "long 1x8x4096x4096x64c",
        "long1h 1x1x4096x4096x64",
        "llama 1x32/8x1024x1024x128c",
        "sd-unet 2x8x4096x4096x40",
        "tiny 64x4x16x16x32",
        "cross 4x8x64x1500x64",
        "d256 1x8x1024x1024x256c",
        "decode1 1x32/8x1x4096x128",
        "decode 8x32/8x1x4096x128",
    ]


def test_cost_of_a_shape():
    entry = parse("2x4/2x3x5x8x16")
    flops = 2 * (2 * 4 * 3 * 5) * (8 + 16)
    costs = {"forward": flops, "backward": 2.5 * flops}
    assert {direction: entry.flops(direction) for direction in costs} == costs
    assert entry.cache_bytes(torch.float32) == 4 * 2 * 2 * 5 * (8 + 16)
    assert parse("2x4/2x3x5x8x16c").flops("forward") == flops / 2


def test_drift_and_noise_are_reported():
    steady = {"ratio": {"median": 2.0, "iqr": 0.1}}
    noisy = {"ratio": {"median": 2.0, "iqr": 0.3}}

    def result(name, forward, backward, dtype="float32"):
        found = {"name": name, "dtype": dtype}
        return found | {"forward": forward, "backward": backward}

    run = {
        "machine": {"load_average": 0.2},
        "peak": {"gflops_before": 100, "gflops_after": 95, "gflops": 100},
        "directions": ["forward", "backward"],
        "results": [result("base", steady, steady)],
    }
    assert report.warnings(run) == []
    run["peak"] |= {"gflops_after": 80, "read_gbs": 40, "read_gbs_before": 30, "read_gbs_after": 40}
    run["results"].append(result("tiny", steady, noisy))
    peak, bandwidth, spread = report.warnings(run)
    assert "peak was 100 GFLOP/s before" in peak and "80 after" in peak
    assert "bandwidth was 30 GB/s before" in bandwidth and "40 after" in bandwidth
    assert spread.endswith("tiny backward")
    run["results"].append(result("tiny", steady, noisy, "float16"))
    assert report.warnings(run)[-1].endswith("tiny float32 backward, tiny float16 backward")


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision(dtype, tmp_path):
    path = tmp_path / "run.json"
    done = run_bench("--shapes", "2x4/2x9x17x8c", "--dtype", dtype, "--repeats", 1, "--json", path)
    assert done.returncode == 0, done.stderr
    run = json.loads(path.read_text())
    assert (run["machine"]["dtype"], run["results"][0]["dtype"]) == (dtype, dtype)
    assert f"{run['peak']['instruction']} peak " in done.stdout
    for error in run["results"][0]["check"].values():
        assert error["error"] <= error["limit"] and error["error"] > 1e-5
