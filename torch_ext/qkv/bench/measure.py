"""Calls timed against each other on a machine that others may use too."""

import math
import statistics
import time
import timeit

MIN_REPEATS = 5
# Calls that are too slow for that many in so long get fewer.
FEWEST_REPEATS, PATIENCE_SECONDS = 2, 10
# Many calls of a short one make a sample; beside a long one, a tenth as long a sample.
MIN_SAMPLE_SECONDS, MAX_SAMPLE_SECONDS = 2e-3, 0.2
MAX_WARM_UP_SECONDS = 1  # but for the call that exceeds it


def measure(calls, seconds, repeats=None, patience=PATIENCE_SECONDS):
    """Times calls, {name: function}, in turn, ours, theirs, ours, theirs ..., so that what disturbs
    one disturbs the others: `repeats` times, or for about `seconds` but MIN_REPEATS times unless
    that takes `patience` seconds.

    Returns {"calls_per_sample": {name: int}, "samples_s": {name: seconds a call, turn by turn}}.
    """
    timers = {name: timeit.Timer(call) for name, call in calls.items()}
    number = sample_sizes({name: warm_up(timer) for name, timer in timers.items()})
    samples = {name: [] for name in calls}
    start, done = time.perf_counter(), 0
    while not enough(done, time.perf_counter() - start, seconds, repeats, patience):
        for name, timer in timers.items():
            samples[name].append(timer.timeit(number[name]) / number[name])
        done += 1
    return {"calls_per_sample": number, "samples_s": samples}


def sample_sizes(taken):
    """How many calls make a sample, of {name: seconds a call}."""
    shortest = max(MIN_SAMPLE_SECONDS, min(MAX_SAMPLE_SECONDS, max(taken.values()) / 10))
    return {name: max(1, math.ceil(shortest / seconds)) for name, seconds in taken.items()}


def enough(done, elapsed, seconds, repeats, patience=PATIENCE_SECONDS):
    """Whether so many samples are, that took so many seconds."""
    if repeats:
        return done >= repeats
    is_patient = done < MIN_REPEATS and elapsed < patience
    return done >= FEWEST_REPEATS and elapsed >= seconds and not is_patient


def warm_up(timer):
    """Seconds a call, the best of a few; of fewer where one takes long."""
    samples = [timer.timeit(1)]
    while len(samples) < 3 and sum(samples) < MAX_WARM_UP_SECONDS:
        samples.append(timer.timeit(1))
    return min(samples)


def quartiles(samples):
    """{"median", "q1", "q3", "iqr"}"""
    samples = samples if len(samples) > 1 else 2 * samples  # of which there have to be two
    q1, median, q3 = statistics.quantiles(samples, n=4, method="inclusive")
    return {"median": median, "q1": q1, "q3": q3, "iqr": q3 - q1}
