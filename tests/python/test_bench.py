"""python -m qkv.bench. No test looks at how long anything took."""

import json
import math
import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from common import attend, max_error

import qkv
from qkv.bench import __main__ as bench
from qkv.bench import machine, report
from qkv.bench.case import Case
from qkv.bench.check import TENSORS, WrongAnswer, check
from qkv.bench.measure import MIN_REPEATS, measure, quartiles
from qkv.bench.shapes import Shape
from qkv.bench.suites import SUITES
from qkv.bench.textbook import attention_f64

GRID = SUITES["grid"]
PNG = b"\x89PNG\r\n\x1a\n"


def run_bench(*arguments, **environment):
    command = [sys.executable, "-m", "qkv.bench", *map(str, arguments)]
    env = {k: v for k, v in os.environ.items() if k != "QKV_ISA"} | environment
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=env)


def sdpa(query, key, value, **options):
    return F.scaled_dot_product_attention(query, key, value, **options)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """(stdout, run, bytes of the plot) of a short run over three shapes."""
    folder = tmp_path_factory.mktemp("bench")
    shapes = "tiny,1x2x8x8x4,2x4/2x1x32x8c"
    done = run_bench(
        "--shapes", shapes, "--seconds", 0.01, "--threads", 2,
        "--json", folder / "run.json", "--plot", folder / "run.png",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    run = json.loads((folder / "run.json").read_text())
    return done.stdout, run, (folder / "run.png").read_bytes()


def test_json_says_everything(finished):
    _, run, _ = finished
    assert (
        run["machine"]
        | {
            "cpu": machine.cpu_model(),
            "threads": 2,
            "isa": qkv.supported_isas()[0],
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
    for result in run["results"]:
        assert set(result["check"]) == set(TENSORS)
        assert all(e["error"] <= e["limit"] for e in result["check"].values())


def test_figures_follow_from_samples(finished):
    _, run, _ = finished
    for result in run["results"]:
        flops = Shape.parse(result["shape"]).forward_flops
        for direction, factor in (("forward", 1), ("backward", 2.5)):
            found = result[direction]
            assert found["repeats"] >= MIN_REPEATS
            pairs = list(zip(found["torch"]["samples_s"], found["qkv"]["samples_s"], strict=True))
            assert len(pairs) == found["repeats"]
            assert found["ratio"] == quartiles([t / q for t, q in pairs])
            for name in ("qkv", "torch"):
                seconds = found[name]["seconds"]
                assert seconds == quartiles(found[name]["samples_s"])
                assert found[name]["gflops"] == flops * factor / seconds["median"] / 1e9
                assert found[name]["share_of_peak"] == found[name]["gflops"] / run["peak"]["gflops"]
    for direction, mean in run["geometric_mean"].items():
        ratios = [r[direction]["ratio"]["median"] for r in run["results"]]
        assert mean == pytest.approx(math.prod(ratios) ** (1 / len(ratios)))


def test_only_decode_reports_memory_rate(finished):
    stdout, run, _ = finished
    assert ["gbs" in r["forward"]["qkv"] for r in run["results"]] == [False, False, True]
    assert "gbs" not in run["results"][2]["backward"]["qkv"]
    forward = run["results"][2]["forward"]["qkv"]
    touched = 4 * 8 * (2 * 4 * 1 * 2 + 2 * 2 * 32 * 2)  # query and output; key and value
    assert forward["gbs"] == touched / forward["seconds"]["median"] / 1e9
    assert "2x4/2x1x32x8c forward reads keys and values at" in stdout


def test_table_is_aligned_and_names_the_machine(finished):
    stdout, run, _ = finished
    lines = stdout.splitlines()
    assert lines[0].startswith(machine.cpu_model()) and "2 threads" in lines[0]
    assert "FMA peak" in lines[1] and "GB/s" in lines[1]
    rows_begin = 1 + next(i for i, x in enumerate(lines) if x.startswith("---"))
    for row, result in zip(lines[rows_begin : rows_begin + 3], run["results"], strict=True):
        assert row.split()[:2] == [result["name"], result["shape"]]
        assert row.split()[2] == f"{result['forward']['qkv']['gflops']:.1f}"
        column = lines[rows_begin - 2].index("BxHq")
        assert row[column:].startswith(result["shape"])
    means = next(x for x in lines if x.startswith("geometric mean")).split()[2:]
    assert means == [f"{run['geometric_mean'][d]:.2f}" for d in report.DIRECTIONS]


def test_markdown_is_a_table(finished):
    rows = [x for x in report.markdown(finished[1]).splitlines() if x.startswith("|")]
    assert len(rows) == 2 + 3 + 1
    assert {row.count("|") for row in rows} == {11}
    assert "| 2x4/2x1x32x8c | 2×4/2×1×32×8 causal |" in rows[4]


def test_plot_is_a_picture(finished):
    assert finished[2].startswith(PNG) and len(finished[2]) > 10_000


@pytest.mark.parametrize("isa", qkv.supported_isas())
def test_isa_holds_torch_likewise(isa, tmp_path):
    done = run_bench(
        "--shapes", "1x1x4x4x4", "--repeats", 1, "--isa", isa, "--json", tmp_path / "run.json"
    )
    assert done.returncode == 0, done.stderr
    run = json.loads((tmp_path / "run.json").read_text())["machine"]
    expected = {"avx512": "AVX512", "avx2": "AVX2", "generic": "DEFAULT"}[isa]
    assert (run["isa"], run["torch_isa"]) == (isa, expected)


def test_qkv_isa_in_the_environment_holds_torch_too(tmp_path):
    done = run_bench(
        "--shapes", "1x1x4x4x4", "--repeats", 1, "--json", tmp_path / "run.json", QKV_ISA="generic"
    )
    assert done.returncode == 0, done.stderr
    run = json.loads((tmp_path / "run.json").read_text())
    assert (run["machine"]["isa"], run["machine"]["torch_isa"]) == ("generic", "DEFAULT")
    assert run["results"][0]["forward"]["repeats"] == 1


def scaled(query, key, value, **options):
    return sdpa(query, key, value, **options) * 1.001


def with_nan(query, key, value, **options):
    output = sdpa(query, key, value, **options)
    return torch.where(torch.arange(output.size(-1)) == 1, torch.nan, output)


def without_one_gradient(query, key, value, **options):
    """Right forward; the gradient of the first key is lost."""
    seen = torch.cat([key[..., :1, :].detach(), key[..., 1:, :]], -2)
    return sdpa(query, seen, value, **options)


def wrong_shape(query, key, value, **options):
    return sdpa(query, key, value, **options)[..., :1, :]


@pytest.mark.parametrize(
    "wrong, tensor",
    [(scaled, "output"), (with_nan, "output"), (without_one_gradient, "grad_key")],
)
def test_wrong_answers_are_not_timed(monkeypatch, capsys, wrong, tensor, tmp_path):
    monkeypatch.setattr(qkv, "attention", wrong)
    monkeypatch.setattr(bench, "measure", lambda *_: pytest.fail("timed a wrong answer"))
    path = tmp_path / "run.json"
    assert bench.main(["--shapes", "2x4/2x9x17x8c", "--json", str(path)]) == 1
    message = capsys.readouterr().err
    assert "refused to time a wrong answer: 2x4/2x9x17x8c" in message
    assert f": {tensor} is off by " in message and "torch is off by" in message
    assert not path.exists()


def test_wrong_shape_is_named(monkeypatch):
    monkeypatch.setattr(qkv, "attention", wrong_shape)
    case = Case(GRID, Shape.parse("1x2x8x8x4"), torch.float32)
    with pytest.raises(WrongAnswer, match=r"output is torch.float32 \[1, 2, 1, 4\], expected"):
        check(case)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("spelling", ["2x4/2x33x70x8c", "3x2x5x9x4x6", "1x2x600x7x4c"])
def test_textbook_is_torchs_autograd(monkeypatch, spelling, dtype):
    """The f64 gradients that answers are held against, in small blocks of queries and of items."""
    monkeypatch.setattr("qkv.bench.textbook.BLOCK_ELEMENTS", 2000)
    case = Case(GRID, Shape.parse(spelling), dtype)
    found = attention_f64(*case.inputs, case.grad_output, case.shape.is_causal)
    inputs = [x.detach().double().requires_grad_() for x in case.inputs]
    output, _ = attend(*inputs, is_causal=case.shape.is_causal, enable_gqa=case.shape.is_grouped)
    grads = torch.autograd.grad(output, inputs, case.grad_output.double())
    for x, truth in zip(found, (output, *grads), strict=True):
        assert max_error(x, truth) < 1e-12
    assert all(e["error"] <= e["limit"] for e in check(case).values())


def test_grid_is_the_promised_one():
    assert [f"{s.name} {s}" for s in GRID.shapes] == [
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
    shape = Shape.parse("2x4/2x3x5x8x16")
    assert shape.forward_flops == 2 * (2 * 4 * 3 * 5) * (8 + 16)
    assert shape.backward_flops == 2.5 * shape.forward_flops
    assert shape.forward_bytes(4) == 4 * 2 * (4 * 3 * (8 + 16) + 2 * 5 * (8 + 16))
    assert Shape.parse("2x4/2x3x5x8x16c").forward_flops == shape.forward_flops / 2


def test_measure_takes_turns():
    order = []
    timing = measure(lambda: order.append("ours"), lambda: order.append("theirs"), 0, repeats=3)
    calls = timing["calls_per_sample"]
    assert len(timing["qkv_s"]) == len(timing["torch_s"]) == 3
    assert order[-6 * calls :] == (["ours"] * calls + ["theirs"] * calls) * 3
    assert len(measure(list, list, seconds=0)["qkv_s"]) == MIN_REPEATS


def test_drift_and_noise_are_reported():
    machine = {"load_average": 0.2}
    steady = {"ratio": {"median": 2.0, "iqr": 0.1}}
    noisy = {"ratio": {"median": 2.0, "iqr": 0.3}}
    run = {
        "machine": machine,
        "peak": {"gflops_before": 100, "gflops_after": 95},
        "results": [{"name": "base", "forward": steady, "backward": steady}],
    }
    assert report.warnings(run) == []
    run["peak"]["gflops_after"] = 80
    run["results"].append({"name": "tiny", "forward": steady, "backward": noisy})
    drift, spread = report.warnings(run)
    assert "100 GFLOP/s before" in drift and "80 after" in drift
    assert spread.endswith("tiny backward")


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--shapes", "bort"], "--shapes: 'bort' is not BxHq"),
        (["--shapes", "tiny,"], "--shapes: '' is not BxHq"),
        (["--shapes", "1x2x8x8"], "--shapes: '1x2x8x8' is not BxHq"),
        (["--shapes", "1x3/2x8x8x4"], "2 key/value heads do not divide 3 query heads"),
        (["--shapes", "1x2x0x8x4"], "'1x2x0x8x4': every size must be at least 1"),
        (["--suite", "nothing"], "invalid choice: 'nothing'"),
        (["--dtype", "bfloat16"], "does not support bfloat16 yet, expected float32 or float64"),
        (["--dtype", "float16"], "does not support float16 yet, expected float32 or float64"),
        (["--dtype", "int8"], "'int8', expected float32 or float64"),
        (["--threads", "0"], "'0', expected a positive int"),
        (["--threads", "two"], "'two', expected a positive int"),
        (["--seconds", "nan"], "'nan', expected a positive float"),
        (["--repeats", "-1"], "'-1', expected a positive int"),
        (["--repeats", "3", "--seconds", "1"], "not allowed with"),
        (["--isa", "sse9"], "--isa: this CPU cannot run 'sse9', expected one of: "),
        (["--json", "no/such/folder/run.json"], "--json: there is no folder no/such/folder"),
        (["--plot", "run.txt"], "--plot: 'run.txt' ends in none of .png, .svg, .pdf"),
    ],
)
def test_bad_arguments_are_named(capsys, arguments, message):
    with pytest.raises(SystemExit) as exit:
        bench.main(arguments)
    assert exit.value.code == 2
    assert message in capsys.readouterr().err


def test_missing_matplotlib_is_named_before_the_run(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(SystemExit):
        bench.main(["--plot", "run.png"])
    assert "matplotlib is missing: pip install matplotlib" in capsys.readouterr().err


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("isa", qkv.supported_isas())
def test_peak_probe_is_a_rate(isa, dtype):
    assert math.isfinite(rate := torch.ops.qkv._probe_fma_gflops(isa, dtype, 1)) and rate > 0


def test_probes_refuse_what_they_cannot_do():
    with pytest.raises(ValueError, match="isa: this CPU has no probe for 'sse9'"):
        torch.ops.qkv._probe_fma_gflops("sse9", torch.float32, 1)
    with pytest.raises(RuntimeError, match="dtype: expected float32 or float64, got Half"):
        torch.ops.qkv._probe_fma_gflops("generic", torch.half, 1)
    with pytest.raises(ValueError, match="num_threads: expected at least 1, got 0"):
        torch.ops.qkv._probe_read_bandwidth(0)
