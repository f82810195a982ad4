"""What python -m qkv.bench says of threads that share a CPU."""

import os

import pytest
import torch
from bench_runs import run_program

from qkv.bench import threads

# /proc/self/task/*/stat of three threads, before and after two of them had worked for 130 ms.
STAT = "{} (python -m (x)) R 1 1 1 0 -1 64 1 0 0 0 {} {} 0 0 20 0 3 0 7 8 9" + " 0" * 14 + " {} 0 0"
TIMES = {"7": (170, 9), "8": (30, 0), "9": (0, 1)}
BEFORE = {i: threads.parsed(STAT.format(i, *times, 0)) for i, times in TIMES.items()}


def after(*cpus):
    stats = STAT.format(7, 180, 12, cpus[0]), STAT.format(8, 43, 0, cpus[1])
    return BEFORE | dict(zip(("7", "8"), map(threads.parsed, stats), strict=True))


def test_threads_that_worked_on_one_cpu_share_it():
    assert threads.shared(BEFORE, after(0, 0)) and threads.shared(BEFORE, after(1, 1))
    assert not threads.shared(BEFORE, after(0, 1))
    # The third thread is where the first one is, and does nothing.
    assert not threads.shared(BEFORE, after(1, 0))
    assert BEFORE["7"] == (179, "0") and after(1, 0)["8"] == (43, "0")
    assert not threads.shared(BEFORE, BEFORE) and not threads.shared({}, {})


def test_all_probes_have_to_agree(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    probes, cpus = [], {0, 1}
    monkeypatch.setattr(threads, "probed", lambda _: probes.pop())
    monkeypatch.setattr(threads, "allowed", lambda: cpus)
    probes[:] = [(BEFORE, after(0, 0))] * threads.PROBES
    assert "2 threads share a CPU, " in (said := threads.warning())
    assert said.endswith("OMP_PROC_BIND=true") and not probes
    probes[:], cpus = [(BEFORE, after(0, 0))] * threads.PROBES, {1}
    assert threads.warning().endswith("there are only 1. Take --threads 1 or OMP_NUM_THREADS=1")
    probes[:] = [(BEFORE, after(0, 1)), (BEFORE, after(1, 1))]
    assert threads.warning() is None and not probes
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert threads.warning() is None


def warned(cpus, **environment):
    """What a benchmark on two threads says on stderr, of a process that may use these CPUs."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cpus)
    try:
        arguments = ("--shapes", "1x1x4x4x4", "--repeats", 1, "--threads", 2)
        return run_program("qkv.bench", *arguments, **environment).stderr
    finally:
        os.sched_setaffinity(0, before)


@pytest.mark.long  # two benchmarks whose threads wait for each other
def test_two_threads_on_one_cpu_are_warned_of():
    cpu = min(os.sched_getaffinity(0))
    for binding in ("false", "true"):
        said = warned({cpu}, OMP_PROC_BIND=binding)
        assert said.startswith("warning: some of the 2 threads share a CPU, ")
        assert said.endswith("there are only 1. Take --threads 1 or OMP_NUM_THREADS=1\n")


@pytest.mark.long
def test_nothing_is_said_of_threads_that_are_bound():
    cpus = sorted(os.sched_getaffinity(0))[:2]
    if len(cpus) < 2:
        pytest.skip("two CPUs are needed")
    assert warned(cpus, OMP_PROC_BIND="true") == ""
