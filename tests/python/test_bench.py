"""python -m qkv.bench. No test looks at how long anything took."""

import functools
import json
import math
import os
import subprocess
import sys
import time

import pytest
import torch
import torch.nn.functional as F
from common import attend, max_error

import qkv
from qkv.bench import __main__ as bench
from qkv.bench import machine, options, report, table, textbook, torch_ways
from qkv.bench.case import Case
from qkv.bench.check import WrongAnswer, check
from qkv.bench.measure import MIN_REPEATS, fastest, measure, quartiles
from qkv.bench.options import OPTIONS, drawn, equal_documents
from qkv.bench.philox import kept, philox
from qkv.bench.suites import SUITES, Entry

GRID = SUITES["grid"]
TENSORS = ("output", "grad_query", "grad_key", "grad_value")
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
        entry = Entry.parse(result["shape"])
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


def rows_of(text):
    """The rows below the titles, up to the empty line, and where each title ends."""
    lines = text.splitlines()
    dashes = next(i for i, line in enumerate(lines) if line.startswith("---"))
    return lines[dashes - 1], lines[dashes + 1 : lines.index("", dashes)]


def test_table_is_aligned_and_names_the_machine(finished):
    stdout, run, _ = finished
    lines = stdout.splitlines()
    assert lines[0].startswith(machine.cpu_model()) and "2 threads" in lines[0]
    assert "FMA peak" in lines[1] and "GB/s" in lines[1]
    titles, rows = rows_of(stdout)
    assert len(rows) == 4
    column, end = titles.index("B×Hq"), titles.index("GFLOP/s") + len("GFLOP/s")
    for row, result in zip(rows, run["results"], strict=False):
        assert row.startswith(result["name"])
        assert row[column:].startswith(table.sizes(result))
        assert row[:end].endswith(f" {result['forward']['qkv']['gflops']:.0f}")
    means = rows[3].split()
    assert means == ["geometric", "mean"] + [f"{x:.2f}" for x in run["geometric_mean"].values()]


def test_markdown_is_a_table(finished):
    rows = [x for x in table.markdown(finished[1]).splitlines() if x.startswith("|")]
    assert len(rows) == 2 + 3 + 1
    assert {row.count("|") for row in rows} == {11}
    assert rows[4].startswith("| 2x4/2x1x32x8c | 2×4/2×1×32×8 causal | ")
    assert all(row.count("**") == 4 for row in rows[2:])


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
    case = Case(Entry.parse("1x2x8x8x4"), torch.float32)
    with pytest.raises(WrongAnswer, match=r"output is torch.float32 \[1, 2, 1, 4\], expected"):
        check(case)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("spelling", ["2x4/2x33x70x8c", "3x2x5x9x4x6", "1x2x600x7x4c"])
def test_textbook_is_torchs_autograd(monkeypatch, spelling, dtype):
    """The f64 gradients that answers are held against, in small blocks of queries and of items."""
    monkeypatch.setattr("qkv.bench.textbook.BLOCK_ELEMENTS", 2000)
    case = Case(Entry.parse(spelling), dtype)
    inputs = [case.inputs[x].detach().double().requires_grad_() for x in case.leaves]
    shape = case.entry.shape
    output, _ = attend(*inputs, is_causal=shape.is_causal, enable_gqa=shape.is_grouped)
    grads = torch.autograd.grad(output, inputs, case.grad_output.double())
    found = textbook.answers(case)
    for name, truth in zip(TENSORS, (output, *grads), strict=True):
        assert max_error(found[name], truth) < 1e-12
    assert all(e["error"] <= e["limit"] for e in check(case).values())


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
    entry = Entry.parse("2x4/2x3x5x8x16")
    flops = 2 * (2 * 4 * 3 * 5) * (8 + 16)
    costs = {"forward": flops, "backward": 2.5 * flops, "both": 3.5 * flops}
    assert {direction: entry.flops(direction) for direction in costs} == costs
    assert entry.shape.forward_bytes(4) == 4 * 2 * (4 * 3 * (8 + 16) + 2 * 5 * (8 + 16))
    assert Entry.parse("2x4/2x3x5x8x16c").flops("forward") == flops / 2


def test_measure_takes_turns():
    order = []
    calls = {name: functools.partial(order.append, name) for name in ("qkv", "base", "torch")}
    timing = measure(calls, 0, repeats=3)
    number = timing["calls_per_sample"]
    assert {name: len(s) for name, s in timing["samples_s"].items()} == dict.fromkeys(calls, 3)
    assert order[-9 * number :] == [name for name in calls for _ in range(number)] * 3
    assert len(measure({"qkv": list}, seconds=0)["samples_s"]["qkv"]) == MIN_REPEATS


def test_fastest_of_torchs_ways_is_kept():
    name, seconds = fastest({"slow": lambda: time.sleep(0.02), "fast": list})
    assert name == "fast" and seconds["fast"] < seconds["slow"]


SMALL = "2x4/2x21x21x8"  # of every option; with windows of 4 keys


def option_case(monkeypatch, option, shape=SMALL, dtype=torch.float32):
    monkeypatch.setattr(options, "WINDOW", (3, 0))
    return Case(Entry.parse(f"{option}:{shape}"), dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("causal", ["", "c"])
@pytest.mark.parametrize("option", OPTIONS)
def test_every_option_passes_its_check(monkeypatch, option, causal, dtype):
    """Which also says that every one of torch's ways computes the same."""
    monkeypatch.setattr("qkv.bench.textbook.BLOCK_ELEMENTS", 500)
    case = option_case(monkeypatch, option, SMALL + causal, dtype)
    found = check(case)
    assert set(found) == {"output"} | {f"grad_{name}" for name in case.leaves}
    assert all(e["error"] <= e["limit"] for e in found.values())


@pytest.mark.parametrize("option", sorted(set(OPTIONS) - {"varlen", "varlen-each", "equal"}))
def test_textbook_with_options_is_torchs_autograd(monkeypatch, option):
    """In small blocks of queries and of items, which with a window see few of the keys."""
    monkeypatch.setattr("qkv.bench.textbook.BLOCK_ELEMENTS", 500)
    case = option_case(monkeypatch, option)
    inputs = {
        name: x.detach().double().requires_grad_(x.requires_grad)
        if isinstance(x, torch.Tensor) and x.is_floating_point()
        else x
        for name, x in case.inputs.items()
    }
    output, _ = attend(**inputs, dropout_seed=7)
    leaves = [inputs[name] for name in case.leaves]
    grads = torch.autograd.grad(output, leaves, case.grad_output.double())
    found = textbook.answers(case, seed=7)
    assert list(found) == ["output"] + [f"grad_{name}" for name in case.leaves]
    for x, truth in zip(found.values(), (output, *grads), strict=True):
        assert max_error(x, truth) < 1e-12


def test_textbook_takes_documents_one_by_one(monkeypatch):
    case = option_case(monkeypatch, "varlen", "5x4/2x21x21x8c", torch.float64)
    assert [end - begin for begin, end in case.documents] == drawn(case.entry.shape)
    found, (begin, end) = textbook.answers(case), case.documents[2]
    inputs = [x[begin:end].detach().transpose(0, 1).requires_grad_() for x in
              (case.inputs[name] for name in case.leaves)]  # fmt: skip
    output, _ = attend(*inputs, is_causal=True, enable_gqa=True)
    grads = torch.autograd.grad(output, inputs, case.grad_output[begin:end].transpose(0, 1))
    for x, truth in zip(found.values(), (output, *grads), strict=True):
        assert max_error(x[begin:end].transpose(0, 1), truth) < 1e-12


def with_wrong(name, change):
    """qkv.attention with one argument changed."""
    attention = qkv.attention

    def wrong(**inputs):
        return attention(**inputs | {name: change(inputs[name])})

    return wrong


def with_gradient_off(x):
    """x itself, but a hundredth more gradient."""
    return x + 0.01 * (x - x.detach())


@pytest.mark.parametrize(
    "option, name, change, tensor",
    [
        ("dropout", "dropout_p", lambda p: p + 0.02, "output"),
        ("bias", "attn_mask", lambda x: 1.001 * x, "output"),
        ("bias", "attn_mask", with_gradient_off, "grad_attn_mask"),
        ("mask", "attn_mask", lambda x: x.logical_not(), "output"),
        ("softcap", "softcap", lambda x: 1.1 * x, "output"),
        ("alibi", "alibi_slopes", lambda x: 1.001 * x, "output"),
        ("slopes", "alibi_slopes", with_gradient_off, "grad_alibi_slopes"),
        ("sinks", "sinks", lambda x: x + 0.001, "output"),
        ("sinks", "sinks", with_gradient_off, "grad_sinks"),
        ("window", "window_size", lambda x: (x[0] - 1, x[1]), "output"),
    ],
)
def test_wrong_options_are_not_timed(monkeypatch, option, name, change, tensor):
    case = option_case(monkeypatch, option)
    monkeypatch.setattr(qkv, "attention", with_wrong(name, change))
    case.base = None
    with pytest.raises(WrongAnswer, match=f": {tensor} is off by "):
        check(case)


def test_wrong_packing_is_not_timed(monkeypatch):
    case = option_case(monkeypatch, "varlen", "5x4/2x21x21x8")
    varlen_attn = qkv.varlen_attn
    case.base = None

    def one_document(*, cu_seq_q, **inputs):
        return varlen_attn(**inputs, cu_seq_q=cu_seq_q[[0, -1]])

    monkeypatch.setattr(qkv, "varlen_attn", one_document)
    with pytest.raises(WrongAnswer, match=": output is off by "):
        check(case)


def test_wrong_base_is_not_timed(monkeypatch):
    case = option_case(monkeypatch, "softcap")
    monkeypatch.setattr(qkv, "attention", with_wrong("is_causal", lambda x: True))
    with pytest.raises(WrongAnswer, match=r"plain \(2x4/2x21x21x8\): output is off by "):
        check(case)


def test_torchs_way_to_other_numbers_is_refused(monkeypatch):
    def scaled(**inputs):
        return textbook.attend(**inputs) * 1.01

    case = option_case(monkeypatch, "softcap")
    case.ways["scaled"] = torch_ways.Call(scaled, case.inputs, case.grad_output)
    with pytest.raises(WrongAnswer, match=r"torch's output \(scaled\) is off by .* from float64"):
        check(case)


def test_philox_is_random123s():
    """The known answers that its authors publish, and what a range of a larger mask is."""
    zeros, ones = (torch.tensor(x) for x in (0, 0xFFFFFFFF))
    answer = [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    assert [x.item() for x in philox([zeros] * 4, (0, 0))] == answer
    answer = [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]
    assert [x.item() for x in philox([ones] * 4, (0xFFFFFFFF, 0xFFFFFFFF))] == answer
    whole = kept(-3, 0.3, range(4), range(9), range(30))
    assert 0.6 < whole.double().mean() < 0.8
    assert whole[1:3, 4:9, 5:23].equal(kept(-3, 0.3, range(1, 3), range(4, 9), range(5, 23)))


def test_options_are_the_promised_ones():
    entries = SUITES["options"].entries
    assert [f"{e.name} {e} {e.at_least} {e.at_most}" for e in entries] == [
        "plain 2x8x1024x1024x64 None None",
        "dropout dropout:2x8x1024x1024x64 5 1.35",
        "bias bias:2x8x1024x1024x64 2.5 None",
        "dv96 2x8x1024x1024x64x96 2.5 None",
        "dv96-padded plain-padded:2x8x1024x1024x64x96 None None",
        "mask mask:2x8x1024x1024x64 None 1.15",
        "softcap softcap:2x8x1024x1024x64 None 1.3",
        "alibi alibi:2x8x1024x1024x64 None 1.1",
        "slopes slopes:2x8x1024x1024x64 None None",
        "sinks sinks:2x8x1024x1024x64 None 1.1",
        "sinks-key sinks-key:2x8x1024x1024x64 None None",
        "window8k window:1x8x8192x8192x64c 8 None",
        "window8k-cut window-cut:1x8x8192x8192x64c None None",
        "window32k growth:1x8x32768x32768x64c None 4.4",
        "varlen varlen:64x8x1024x1024x64 2 1.25",
        "varlen-each varlen-each:64x8x1024x1024x64 None None",
    ]
    base = {e.name: f"{e.base.name}, {e.base}" for e in entries if e.base}
    assert base["dropout"] == "plain, 2x8x1024x1024x64"
    assert base["window32k"] == "L / 4, window-alone:1x8x8192x8192x64c"
    assert base["varlen"] == "equal lengths, equal:64x8x585x585x64"


def test_cost_of_options(monkeypatch):
    monkeypatch.setattr(options, "WINDOW", (3, 0))
    pairs = 4 + 4 + 4 + 3 + 2 + 1  # 6 queries, the last 4 keys of each
    assert Entry.parse("window:2x4x6x6x8").flops("forward") == 2 * 2 * 4 * pairs * (8 + 8)
    entry = Entry.parse("varlen:64x8x1024x1024x64")
    lengths = drawn(entry.shape)
    assert len(lengths) == 64 and min(lengths) >= 16 and max(lengths) <= 1024
    assert entry.flops("forward") == 2 * 8 * sum(n * n for n in lengths) * (64 + 64)
    assert abs(entry.base.flops("both") / entry.flops("both") - 1) < 1 / 585
    assert equal_documents(entry.shape)[2] == entry.base.shape


@pytest.fixture(scope="module")
def finished_options(tmp_path_factory):
    """Like finished: one option that torch can and we have a base for, one without either."""
    folder = tmp_path_factory.mktemp("bench")
    done = run_bench(
        "--suite", "options", "--shapes", "sinks:1x2x8x8x4,growth:1x2x8x8x4,varlen:3x2x8x8x4c",
        "--seconds", 0.01, "--threads", 2,
        "--json", folder / "run.json", "--plot", folder / "run.png",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    run = json.loads((folder / "run.json").read_text())
    return done.stdout, run, (folder / "run.png").read_bytes()


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
    titles, rows = rows_of(stdout)
    assert titles.split()[:4] == ["shape", "B×Hq/Hkv×L×S×D", "×", "torch"] and len(rows) == 3
    for row, result in zip(rows, run["results"], strict=True):
        both, at = result["both"], titles.index("own: that of")
        assert row[at:].startswith(result["base"])
        assert row[at:].removeprefix(result["base"]).strip() == (both["way"] or "")
        assert f" {both['own_ratio']['median']:.2f}" in row
        if "ratio" in both:
            assert f" {both['ratio']['median']:.2f}" in row
    lines = [x for x in table.markdown(run).splitlines() if x.startswith("|")]
    assert len(lines) == 2 + 3 and {line.count("|") for line in lines} == {13}


def test_plot_of_options_is_a_picture(finished_options):
    assert finished_options[2].startswith(PNG) and len(finished_options[2]) > 10_000


def test_promises_that_do_not_hold_are_said():
    def result(name, torchs, own, at_least, at_most):
        both = {"ratio": quartiles([torchs]), "own_ratio": quartiles([own])}
        return {"name": name, "promised": {"at_least": at_least, "at_most": at_most}, "both": both}

    run = {
        "machine": {"load_average": 0.2},
        "peak": {"gflops_before": 100, "gflops_after": 100},
        "directions": ["both"],
        "results": [
            result("kept", 5, 1.35, 5, 1.35),
            result("slow", 4.9, 1.36, 5, 1.35),
            result("free", 0.1, 9, None, None),
        ],
    }
    assert report.warnings(run) == [
        "slow: not at least 5 times torch's speed, as promised",
        "slow: not at most 1.35 times our own time, as promised",
    ]
    assert [table.promise("at_least", "≥").cell(r) for r in run["results"]] == ["≥ 5", "≥ 5 !", ""]


def test_drift_and_noise_are_reported():
    machine = {"load_average": 0.2}
    steady = {"ratio": {"median": 2.0, "iqr": 0.1}}
    noisy = {"ratio": {"median": 2.0, "iqr": 0.3}}
    run = {
        "machine": machine,
        "peak": {"gflops_before": 100, "gflops_after": 95},
        "directions": ["forward", "backward"],
        "results": [{"name": "base", "promised": {}, "forward": steady, "backward": steady}],
    }
    assert report.warnings(run) == []
    run["peak"]["gflops_after"] = 80
    run["results"].append({"name": "tiny", "promised": {}, "forward": steady, "backward": noisy})
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
        (["--shapes", "flash:1x2x8x8x4"], "'flash' is no option; expected one of plain, "),
        (["--shapes", "window:1x2x8x9x4"], "window needs as many keys as queries"),
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
