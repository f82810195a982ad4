"""python -m benchmarks --suite derivatives."""

import contextlib
import io
import json

import pytest
import torch
from bench_runs import (
    PNG,
    TENSORS,
    leave_out_compiled,
    make_up_rates,
    markdown_rows,
    sdpa,
    tables_of,
)
from torch.nn.attention import SDPBackend, sdpa_kernel

import qkv
from benchmarks import __main__ as benchmarks
from benchmarks import memory, truth
from benchmarks.call import Call
from benchmarks.case import Case
from benchmarks.check import WrongAnswer, check
from benchmarks.report import figures
from benchmarks.suites import SUITES, parse_derivatives
from benchmarks.tables import broken, markdown
from qkv.bench.measure import quartiles
from qkv.testing import attention, max_error


@pytest.fixture(autouse=True)
def not_compiled(monkeypatch):
    leave_out_compiled(monkeypatch)


DIRECTIONS = ["jvp", "double_backward", "backward_twice"]
SECONDS = ("second_query", "second_key", "second_value", "second_grad_output")


def derivative_case(spelling, dtype=torch.float32):
    return Case(parse_derivatives(spelling), dtype, with_tangents=True)


def test_derivatives_are_the_promised_ones():
    suite = SUITES["derivatives"]
    assert [*suite.directions] == DIRECTIONS and suite.remembered == ("jvp", "backward_twice")
    assert suite.dtypes == (torch.float32, torch.bfloat16)
    bounds = [
        [(p.at_least, p.at_most) for p in map(e.promised.get, DIRECTIONS) if p]
        for e in suite.entries
    ]
    assert [f"{e.name} {e} {b}" for e, b in zip(suite.entries, bounds, strict=True)] == [
        "L1024 2x8x1024x1024x64 [(4, 2.9), (None, 3.4), (2.4, None)]",
        "L1024c 2x8x1024x1024x64c [(4, 2.9), (None, 3.4), (2.4, None)]",
        "L4096 2x8x4096x4096x64 [(5, 2.9), (None, 3.4), (3.2, None)]",
        "L4096c 2x8x4096x4096x64c [(5, 2.9), (None, 3.4), (3.2, None)]",
        "L16384 alone:1x1x16384x16384x64 [(None, 2.9), (None, 3.4)]",
    ]


@pytest.mark.parametrize("spelling", ["2x4/2x33x70x8c", "3x2x5x9x4x6", "bias:1x2x40x40x8"])
def test_truth_in_blocks(monkeypatch, spelling):
    """In blocks of queries, and of batch items, as of all at once by the definitions."""
    monkeypatch.setattr("benchmarks.truth.BLOCK_ELEMENTS", 500)
    case = derivative_case(spelling, torch.float64)
    found = check(case)
    assert {"tangent", *SECONDS} <= set(found)
    call = Call(attention, case.inputs, case.grad_output, tangents=case.tangents)
    truths = truth.answers(case)
    for name, expected in ({"output": call.output()} | call.derivatives()).items():
        assert max_error(truths.pop(name), expected) < 1e-11
    assert not truths


def test_second_derivatives_are_those_of_the_gradients():
    """What is timed, step by step and with other functions of torch, in float64."""
    case = derivative_case("1x2x7x9x4", torch.float64)
    names, x = [*case.leaves], [case.inputs[name].detach() for name in case.leaves]
    t = [*case.tangents.values()]

    def output(*x):
        with sdpa_kernel(SDPBackend.MATH):
            return sdpa(*x)

    def gradients(grad_output, *x):
        return torch.func.vjp(output, *x)[1](grad_output)

    expected = torch.func.vjp(gradients, case.grad_output, *x)[1](tuple(t))
    expected = dict(zip(["grad_output", *names], expected, strict=True))
    found = case.calls["qkv"].derivatives()
    alone = dict(
        zip([*names, "grad_output"], case.calls["qkv"].timed("double_backward")(), strict=True)
    )
    for name, value in expected.items():
        assert max_error(found[f"second_{name}"], value) < 1e-12
        assert max_error(alone[name], value) < 1e-12
    _, tangent = torch.autograd.functional.jvp(output, tuple(x), tuple(t))
    assert max_error(found["tangent"], tangent) < 1e-12


class Wrong(torch.autograd.Function):
    """x itself, and its gradient; the derivative of the gradient, or of x forward, is 1 % off."""

    @staticmethod
    def forward(x):
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, grad):
        return WrongBackward.apply(grad)

    @staticmethod
    def jvp(ctx, tangent):
        return tangent * 1.01


class WrongBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, grad):
        return grad.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * 1.01


@pytest.mark.parametrize("wrong", ["tangent", "second_grad_output"])
def test_wrong_derivatives_are_not_timed(monkeypatch, wrong):
    """Their output and gradients are right: only what this suite asks for is not."""
    case = derivative_case("2x2x16x16x8c")
    check(case)
    right = qkv.attention

    def attention(**inputs):
        return Wrong.apply(right(**inputs))

    monkeypatch.setattr(qkv, "attention", attention)
    if wrong == "second_grad_output":
        monkeypatch.setattr(Wrong, "jvp", staticmethod(lambda ctx, tangent: tangent.clone()))
    with pytest.raises(WrongAnswer, match=f": {wrong} is off by "):
        check(derivative_case("2x2x16x16x8c"))
    check(Case(case.entry, torch.float32))


def test_torchs_way_is_on_its_math_path():
    """The others raise."""
    case = derivative_case("1x2x16x16x8")
    assert case.ways["SDPA"].derivatives().keys() > {"tangent", *SECONDS}
    fused = Call(sdpa, case.inputs, case.grad_output, tangents=case.tangents)
    with pytest.raises((RuntimeError, NotImplementedError)):
        fused.derivatives()


@pytest.mark.long
def test_memory_is_what_a_call_takes():
    """Of torch's path, whose scores alone take 64 MiB of two heads, and which holds several."""
    case = derivative_case("1x2x2048x2048x8")
    found = memory.extra_bytes(case, "jvp", "SDPA")
    scores = 4 * 2 * 2048 * 2048
    assert 2 * scores < found["torch"] < 20 * scores
    assert 0 <= found["qkv"] < scores / 2
    assert set(memory.extra_bytes(derivative_case("alone:1x1x8x8x4"), "jvp", None)) == {"qkv"}


def test_memory_of_ours_in_this_process():
    """Which memory.extra_bytes measures in one of its own."""
    taken = memory.taken(derivative_case("1x1x8x8x4"), "jvp", None, torch.get_num_threads())
    assert 0 <= taken < 2**28


@pytest.mark.long
def test_memory_that_cannot_be_measured_is_an_error():
    with pytest.raises(RuntimeError, match="measuring the memory of 1x1x8x8x4 sideways qkv failed"):
        memory.extra_bytes(derivative_case("1x1x8x8x4"), "sideways", None)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """(stdout, run, bytes of the plot) of a short run, the memory of which is made up: each figure
    would take a process."""
    folder, printed = tmp_path_factory.mktemp("bench"), io.StringIO()

    def extra_bytes(case, direction, way):
        return {"qkv": 3 << 20} | ({"torch": 7 << 20} if way else {})

    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed):
        patch.delenv("QKV_ISA", raising=False)
        make_up_rates(patch)
        patch.setattr("benchmarks.run.extra_bytes", extra_bytes)
        arguments = ["--suite", "derivatives", "--shapes", "2x4/2x24x24x8,alone:1x1x32x32x8c",
                     "--seconds", "0.01", "--json", str(folder / "run.json"),
                     "--plot", str(folder / "run.png")]  # fmt: skip
        assert benchmarks.main(arguments) == 0
    run = json.loads((folder / "run.json").read_text())
    return printed.getvalue(), run, (folder / "run.png").read_bytes()


def test_figures_follow_from_samples(finished):
    _, run, _ = finished
    assert run["directions"] == DIRECTIONS
    assert [(r["option"], r["dtype"]) for r in run["results"]] == [
        (option, dtype) for option in ("plain", "alone") for dtype in ("float32", "bfloat16")
    ]
    for result in run["results"]:
        assert set(result["check"]) == {*TENSORS, "tangent", *SECONDS}
        entry = parse_derivatives(f"{result['option']}:{result['shape']}")
        for direction, plain in (("jvp", "forward"), ("double_backward", "backward")):
            found = result[direction]
            ours, base = (found[name]["samples_s"] for name in ("qkv", "base"))
            assert found["own_ratio"] == quartiles([q / b for q, b in zip(ours, base, strict=True)])
            flops = found["base"]["gflops"] * found["base"]["seconds"]["median"] * 1e9
            assert flops == pytest.approx(entry.flops(plain))
        assert "base" not in result["backward_twice"]
        for direction in DIRECTIONS:
            found, is_beside = result[direction], result["option"] == "plain"
            assert ("torch" in found) == ("ratio" in found) == is_beside
            has_memory = direction != "double_backward"
            assert ("extra_bytes" in found["qkv"]) == has_memory
            assert ("extra_bytes" in found.get("torch", {})) == (is_beside and has_memory)


def test_table_of_derivatives(finished):
    stdout, run, _ = finished
    [(titles, rows)] = tables_of(stdout)
    names = ("jvp", "second backward", "first + second backward")
    for row, (result, direction, name) in zip(
        rows, [(r, *d) for r in run["results"] for d in zip(DIRECTIONS, names, strict=True)],
        strict=True,
    ):  # fmt: skip
        cells, found = dict(zip(titles, row, strict=True)), result[direction]
        assert (cells["dtype"], cells["derivative"]) == (result["dtype"], name)
        own = cells["× own time (IQR)"]
        assert own.startswith(f"{found['own_ratio']['median']:.2f}" if "own_ratio" in found else "")
        assert bool(own) == ("own_ratio" in found)
        if "extra_bytes" in found.get("torch", {}):
            assert (cells["extra MiB"], cells["torch's MiB"]) == ("3", "7")
    lines = markdown_rows(markdown(run, SUITES["derivatives"].tables(run)))
    assert len(lines) == 2 + 4 * 3 and {line.count("|") for line in lines} == {14}


def test_plot_of_derivatives_is_a_picture(finished):
    assert finished[2].startswith(PNG) and len(finished[2]) > 10_000


def test_promises_are_of_float32():
    timing = {"samples_s": {"qkv": [2.0], "base": [0.5], "torch": [6.0]},
              "calls_per_sample": dict.fromkeys(("qkv", "base", "torch"), 1)}  # fmt: skip
    entry, results = SUITES["derivatives"].entries[0], []
    for dtype in (torch.float32, torch.bfloat16):
        found = figures(entry, dtype, "jvp", timing, {"way": "SDPA"}, {})
        results.append(entry.described(dtype) | {"jvp": found})
    assert [*broken({"results": results})] == [
        "L1024 jvp: not at least 4 times torch's speed, as promised",
        "L1024 jvp: not at most 2.9 times our own time, as promised",
    ]
    assert results[0]["promised"]["backward_twice"]["at_least"] == 2.4
    assert results[1]["promised"] == {}
