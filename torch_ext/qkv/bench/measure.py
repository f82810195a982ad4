"""Two calls timed against each other on a machine that others may use too."""

import math
import statistics
import time
import timeit

MIN_REPEATS = 5
MIN_SAMPLE_SECONDS = 2e-3  # many calls of a short one make a sample


def measure(ours, theirs, seconds, repeats=None):
    """Times both in turn, ours, theirs, ours, theirs ..., so that what disturbs one disturbs
    the other: `repeats` times, or for about `seconds` but MIN_REPEATS times at least.

    Returns {"calls_per_sample", "qkv_s", "torch_s"}: lists of seconds a call, in pairs.
    """
    ours, theirs = timeit.Timer(ours), timeit.Timer(theirs)
    shortest = min(warm_up(ours), warm_up(theirs))
    calls = max(1, math.ceil(MIN_SAMPLE_SECONDS / shortest))
    qkv_s, torch_s = [], []
    stop = time.perf_counter() + seconds
    while len(qkv_s) < (repeats or MIN_REPEATS) or (not repeats and time.perf_counter() < stop):
        qkv_s.append(ours.timeit(calls) / calls)
        torch_s.append(theirs.timeit(calls) / calls)
    return {"calls_per_sample": calls, "qkv_s": qkv_s, "torch_s": torch_s}


def warm_up(timer):
    """Seconds a call, the best of a few."""
    return min(timer.repeat(repeat=3, number=1))


def quartiles(samples):
    """{"median", "q1", "q3", "iqr"}"""
    if len(samples) == 1:
        q1 = median = q3 = samples[0]
    else:
        q1, median, q3 = statistics.quantiles(samples, n=4, method="inclusive")
    return {"median": median, "q1": q1, "q3": q3, "iqr": q3 - q1}
