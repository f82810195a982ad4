"""python -m qkv.bench: what it prints, and that it times no wrong answer."""

import re

import pytest
import torch
import torch.nn.functional as F
from bench_runs import make_up_rates, run_program

import qkv
from qkv.bench import __main__ as bench
from qkv.bench import machine
from qkv.bench.passes import Passes
from qkv.bench.shapes import Shape

pytestmark = pytest.mark.usefixtures("no_isa_asked_for")


SHAPES = ("tiny", "1x2x8x8x4c", "2x4/2x1x32x8")


def expect_table(text):
    """Of SHAPES, two threads, in float32."""
    about, peak, empty, titles, *rows = text.splitlines()
    assert about.startswith(machine.cpu_model()) and "2 threads, float32" in about
    assert peak.startswith("FMA peak ") and peak.endswith(" GB/s") and not empty
    assert re.split("  +", titles)[:3] == ["shape", "B×Hq/Hkv×L×S×D", "pass"]
    cells = [re.split("  +", row) for row in rows]
    sizes = ("64×4×16×16×32", "1×2×8×8×4 causal", "2×4/2×1×32×8")
    passes = [(*x, d) for x in zip(SHAPES, sizes, strict=True) for d in ("forward", "backward")]
    assert [tuple(row[:3]) for row in cells[:6]] == passes
    units = [re.findall("GFLOP/s|GB/s", row) for row in rows[:6]]
    assert units == [["GFLOP/s"]] * 4 + [["GB/s"], []]
    means = [" ".join(row[:2]) for row in cells[6:]]
    assert means == ["geometric mean forward", "geometric mean backward"]


def test_a_row_for_each_pass(monkeypatch, capsys):
    make_up_rates(monkeypatch)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert bench.main(["--shapes", ",".join(SHAPES), "--repeats", "1"]) == 0
    expect_table(capsys.readouterr().out)


@pytest.mark.long
def test_in_a_process_of_its_own():
    """As users run it: it needs neither tabulate nor tqdm."""
    arguments = ("--shapes", ",".join(SHAPES), "--repeats", 2, "--threads", 2)
    done = run_program("qkv.bench", *arguments)
    assert done.returncode == 0, done.stderr
    expect_table(done.stdout)


def test_figures_follow_from_samples():
    peak, samples = {"gflops": 4.0, "read_gbs": 2.0}, {"qkv": [2e-6] * 3, "torch": [5e-6] * 3}
    shape = Shape.parse("1x2x10x10x5")  # 2 products of 2 heads, 2 FLOPs each: 4000
    cells, ratio = bench.row(shape, torch.float32, "forward", samples, peak)
    assert cells == ("0.002", "0.005", "2.50 (0.00)", "2 GFLOP/s", "50%")
    assert ratio == pytest.approx(2.5)
    cells, _ = bench.row(shape, torch.float32, "backward", samples, peak)
    assert cells[3:] == ("5 GFLOP/s", "125%")
    decode = Shape.parse("1x2/1x1x100x5")  # keys and values of 4000 bytes
    assert bench.row(decode, torch.float32, "forward", samples, peak)[0][3:] == ("2 GB/s", "100%")
    assert bench.row(decode, torch.float32, "backward", samples, peak)[0][3:] == ("", "")
    causal = Shape.parse("1x2/1x1x100x5c")  # it sees one key of 100
    assert bench.row(causal, torch.float32, "forward", samples, peak)[0][4] == "1%"


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "float16"])
@pytest.mark.parametrize(
    "spelling",
    ["2x4/2x33x70x8x6", "2x4x40x40x8c", "2x4/2x1x70x8", "1x8x1x4096x64c", "4x8/4x1x1x64"],
)
def test_right_answers_pass(spelling, dtype):
    """Also where each query sees one key, and gradients of query and key are 0."""
    Passes(Shape.parse(spelling), getattr(torch, dtype)).check(spelling)


def test_a_case_is_the_same_each_time():
    one, other = (Passes(Shape.parse("2x4/2x5x7x8"), torch.float32) for _ in range(2))
    assert all(x.equal(y) for x, y in zip(one.inputs, other.inputs, strict=True))


def with_nan(output):
    return torch.where(torch.arange(output.size(-1)) == 1, torch.nan, output)


@pytest.mark.parametrize("wrong", [lambda x: x * 1.001, with_nan])
def test_wrong_answers_are_not_timed(monkeypatch, capsys, wrong):
    def attention(*inputs, **options):
        return wrong(F.scaled_dot_product_attention(*inputs, **options))

    monkeypatch.setattr(qkv, "attention", attention)
    monkeypatch.setattr(bench, "measure", lambda *_: pytest.fail("timed a wrong answer"))
    make_up_rates(monkeypatch)
    assert bench.main(["--shapes", "2x4/2x9x17x8c"]) == 1
    assert "refused to time a wrong answer: 'output' of 2x4/2x9x17x8c" in capsys.readouterr().err


def test_a_lost_gradient_is_named(monkeypatch):
    def attention(query, key, value, **options):
        seen = torch.cat([key[..., :1, :].detach(), key[..., 1:, :]], -2)
        return F.scaled_dot_product_attention(query, seen, value, **options)

    monkeypatch.setattr(qkv, "attention", attention)
    with pytest.raises(AssertionError, match="'grad_key' of here is off by"):
        Passes(Shape.parse("1x2x8x8x4"), torch.float32).check("here")
