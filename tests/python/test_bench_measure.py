"""How the benchmark takes turns, and what it knows of the machine."""

import functools
import math
import time

import pytest
import torch

import qkv
from benchmarks.call import Call
from benchmarks.case import fastest_way
from benchmarks.report import best
from qkv.bench.measure import MIN_REPEATS, enough, measure, sample_sizes


def test_measure_takes_turns():
    order = []
    calls = {name: functools.partial(order.append, name) for name in ("qkv", "base", "torch")}
    timing = measure(calls, 1, repeats=3)
    number = timing["calls_per_sample"]
    assert {name: len(s) for name, s in timing["samples_s"].items()} == dict.fromkeys(calls, 3)
    assert order[-3 * sum(number.values()) :] == [n for n in calls for _ in range(number[n])] * 3
    assert len(measure({"qkv": list}, seconds=1e-6)["samples_s"]["qkv"]) == MIN_REPEATS


def test_a_fast_call_is_sampled_as_long_as_a_slow_one_deserves():
    assert sample_sizes({"qkv": 1e-3, "torch": 1e-4}) == {"qkv": 2, "torch": 20}
    assert sample_sizes({"qkv": 1e-2, "torch": 1.0}) == {"qkv": 10, "torch": 1}
    assert sample_sizes({"qkv": 1e-2, "torch": 60.0}) == {"qkv": 20, "torch": 1}


@pytest.mark.parametrize(
    "done, elapsed, expected",
    [(5, 2.0, True), (4, 2.0, False), (9, 1.9, False), (2, 10.0, True), (3, 9.0, False),
     (1, 99.0, False)],
)  # fmt: skip
def test_slow_calls_get_fewer_turns_but_two(done, elapsed, expected):
    assert enough(done, elapsed, seconds=2.0, repeats=None) == expected


def test_fastest_of_torchs_ways_is_kept():
    calls = {"slow": lambda: time.sleep(0.02), "fast": list}
    ways = {name: Call(function, {}, torch.ones(1)) for name, function in calls.items()}
    name, seconds = fastest_way(ways, "forward")
    assert name == "fast" and seconds["fast"] < seconds["slow"]


INSTRUCTIONS = {"avx512bf16": "vdpbf16ps", "amx": "tdpbf16ps"}  # for bfloat16; else FMA


@pytest.mark.one_in(8)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("isa", qkv.supported_isas())
def test_peak_probe_is_a_rate(isa, dtype):
    instruction, rate = torch.ops.qkv._probe_peak(isa, dtype, 1)
    assert math.isfinite(rate) and rate > 0
    expected = INSTRUCTIONS.get(isa, "FMA") if dtype == torch.bfloat16 else "FMA"
    assert instruction == expected


def test_rates_before_and_after_a_run():
    before = {"read_gbs": 10.0, "gflops": 5.0, "instruction": "FMA"}
    after = {"read_gbs": 9.0, "gflops": 6.0, "instruction": "FMA"}
    assert best(before, after) == {
        "read_gbs": 10.0, "read_gbs_before": 10.0, "read_gbs_after": 9.0,
        "gflops": 6.0, "gflops_before": 5.0, "gflops_after": 6.0, "instruction": "FMA",
    }  # fmt: skip


def test_probes_refuse_what_they_cannot_do():
    with pytest.raises(ValueError, match="isa: this CPU has no probe for 'sse9'"):
        torch.ops.qkv._probe_peak("sse9", torch.float32, 1)
    with pytest.raises(RuntimeError, match="dtype: expected float32, .* or float16, got Char"):
        torch.ops.qkv._probe_peak("generic", torch.int8, 1)
    with pytest.raises(ValueError, match="num_threads: expected at least 1, got 0"):
        torch.ops.qkv._probe_read_bandwidth(0)
