"""Calls timed against each other on a machine that others may use too."""

import math
import statistics
import time
import timeit

MIN_REPEATS = 5
MIN_SAMPLE_SECONDS = 2e-3  # many calls of a short one make a sample
MAX_WARM_UP_SECONDS = 1  # but for the call that exceeds it


def measure(calls, seconds, repeats=None):
    """Times calls, {name: function}, in turn, ours, theirs, ours, theirs ..., so that what disturbs
    one disturbs the others: `repeats` times, or for about `seconds` but MIN_REPEATS times at least.

    Returns {"calls_per_sample", "samples_s": {name: seconds a call, turn by turn}}.
    """
    timers = {name: timeit.Timer(call) for name, call in calls.items()}
    shortest = min(warm_up(timer) for timer in timers.values())
    number = max(1, math.ceil(MIN_SAMPLE_SECONDS / shortest))
    samples = {name: [] for name in calls}
    stop = time.perf_counter() + seconds
    done = 0
    while done < (repeats or MIN_REPEATS) or (not repeats and time.perf_counter() < stop):
        for name, timer in timers.items():
            samples[name].append(timer.timeit(number) / number)
        done += 1
    return {"calls_per_sample": number, "samples_s": samples}


def fastest(calls):
    """The name of the call that takes least, and {name: seconds}; each tried a few times."""
    seconds = {name: warm_up(timeit.Timer(call)) for name, call in calls.items()}
    return min(seconds, key=seconds.get), seconds


def warm_up(timer):
    """Seconds a call, the best of a few; of fewer where one takes long."""
    samples = [timer.timeit(1)]
    while len(samples) < 3 and sum(samples) < MAX_WARM_UP_SECONDS:
        samples.append(timer.timeit(1))
    return min(samples)


def quartiles(samples):
    """{"median", "q1", "q3", "iqr"}"""
    if len(samples) == 1:
        q1 = median = q3 = samples[0]
    else:
        q1, median, q3 = statistics.quantiles(samples, n=4, method="inclusive")
    return {"median": median, "q1": q1, "q3": q3, "iqr": q3 - q1}
