"""From samples to figures. A run is a plain dict, as --json writes it:

{"suite": its name, "machine": {...},
 "peak": {"read_gbs", "read_gbs_before", "read_gbs_after"}, and where arithmetic is the limit also
         {"instruction", "gflops", "gflops_before", "gflops_after"},
 "directions": of "forward", "backward", "both", or "jvp", "double_backward", "backward_twice",
 "results": [{"name", "shape", "option", "dtype", "sizes", "read_gbs": what the memory gave just
              before or after, where it is the limit, "base": whose time ours is compared with,
              or None, "promised": {direction: {"at_least": times torch's speed, or None,
              "at_most": times our own time, or None}}, "check", direction: D, ...}],
 "geometric_mean": {direction: of the ratios to torch but for decoding, which memory limits; None
                    for several dtypes}, "warnings": [...]}

where D is {"repeats", "way": torch's that was fastest, "tried_s": {way: s} of several, "skipped":
{way: why it took no part}, "qkv": C, "torch": C, "base": C, "ratio": quartiles of torch's time over
ours, pair by pair, "own_ratio": of our time over the base's; of "jvp" and "double_backward" the
base is our own plain pass} and C is {"seconds": quartiles of a call, "samples_s",
"calls_per_sample", "gflops", and of one dtype "share_of_peak"}, for decoding also "gbs", of keys
and values, and "share_of_bandwidth", of read_gbs, and where memory was measured "extra_bytes".
Where torch has no way, or nothing is the base, "torch" and "ratio", or "base" and "own_ratio", are
missing.
"""

import dataclasses
import statistics
from typing import NamedTuple

import torch

from .entry import PLAIN_PASS, Entry
from .machine import name_of
from .measure import quartiles

NOISY = 0.1  # interquartile range of a ratio, relative to its median
DRIFT = 0.1  # between the peak before and after the run


class Measured(NamedTuple):
    entry: Entry
    dtype: torch.dtype
    errors: dict  # what check() returned
    timings: dict  # {direction: what time() returned}
    read_gbs: float | None = None  # from memory, where that is the limit: just before or just after


def summarize(suite, machine, peak, measured):
    """measured: list of Measured."""
    results = []
    for entry, dtype, errors, timings, read_gbs in measured:
        result = {"name": entry.name, "shape": str(entry.shape), "option": entry.option}
        result["dtype"] = name_of(dtype)
        result["sizes"] = dataclasses.asdict(entry.shape)
        result["base"] = entry.base and entry.base.name
        promised = entry.promised if dtype == torch.float32 else {}
        result["promised"] = {d: dataclasses.asdict(promise) for d, promise in promised.items()}
        result["check"] = errors
        if read_gbs:
            result["read_gbs"] = read_gbs
        for direction, timing in timings.items():
            result[direction] = figures(entry, dtype, direction, timing, peak, read_gbs)
        results.append(result)
    directions = list(measured[0].timings)
    run = {"suite": suite, "machine": machine, "peak": peak}
    run |= {"directions": directions, "results": results}
    run["geometric_mean"] = {direction: mean(results, direction) for direction in directions}
    run["warnings"] = warnings(run)
    return run


def is_decode(result):
    """One query a head: memory, not arithmetic, is the limit."""
    return result["sizes"]["seqlen_q"] == 1


def several_dtypes(run):
    return len({r["dtype"] for r in run["results"]}) > 1


def mean(results, direction):
    if several_dtypes({"results": results}):
        return None
    found = [r[direction] for r in results if not is_decode(r)]
    ratios = [timing["ratio"]["median"] for timing in found if "ratio" in timing]
    return statistics.geometric_mean(ratios) if ratios else None


def figures(entry, dtype, direction, timing, peak, read_gbs):
    taken = timing["samples_s"]
    result: dict = {x: timing[x] for x in ("way", "tried_s", "skipped")}
    result["repeats"] = len(taken["qkv"])
    for name, samples in taken.items():
        computed, how = (entry, direction) if name != "base" else base_of(entry, direction)
        seconds = quartiles(samples)
        gflops = computed.flops(how) / seconds["median"] / 1e9
        result[name] = {
            "seconds": seconds,
            "samples_s": samples,
            "calls_per_sample": timing["calls_per_sample"][name],
            "gflops": gflops,
        }
        if "gflops" in peak:
            result[name]["share_of_peak"] = gflops / peak["gflops"]
        if read_gbs and direction == "forward":
            gbs = computed.cache_bytes(dtype) / seconds["median"] / 1e9
            result[name] |= {"gbs": gbs, "share_of_bandwidth": gbs / read_gbs}
        if name in timing["extra_bytes"]:
            result[name]["extra_bytes"] = timing["extra_bytes"][name]
    if "torch" in taken:
        pairs = zip(taken["torch"], taken["qkv"], strict=True)
        result["ratio"] = quartiles([theirs / ours for theirs, ours in pairs])
    if "base" in taken:
        pairs = zip(taken["base"], taken["qkv"], strict=True)
        result["own_ratio"] = quartiles([ours / base for base, ours in pairs])
    return result


def base_of(entry, direction):
    """(entry, direction) that our own time is compared with."""
    plain = PLAIN_PASS.get(direction)
    return (entry, plain) if plain else (entry.base, direction)


def errors_of(check, direction):
    """Those of what a call in this direction computes: of check, by tensor, a list."""
    kinds = {
        "forward": ("output",),
        "backward": ("grad_",),
        "both": ("output", "grad_"),
        "jvp": ("tangent",),
        "double_backward": ("second_",),
        "backward_twice": ("grad_", "second_"),
    }
    return [errors for tensor, errors in check.items() if tensor.startswith(kinds[direction])]


def label(run, result):
    """Of one result among all."""
    return f"{result['name']} {result['dtype']}" if several_dtypes(run) else result["name"]


def is_noisy(ratio):
    return ratio["iqr"] > NOISY * ratio["median"]


def kept(result, direction, bound):
    """Whether the promise "at_least" or "at_most" holds; None where there is none."""
    promised = result["promised"].get(direction, {}).get(bound)
    found = result.get(direction, {}).get({"at_least": "ratio", "at_most": "own_ratio"}[bound])
    if promised is None or found is None:
        return None
    return found["median"] >= promised if bound == "at_least" else found["median"] <= promised


BOUNDS = {"at_least": "times torch's speed", "at_most": "times our own time"}
PEAKS = (("gflops", "peak", "GFLOP/s"), ("read_gbs", "read bandwidth", "GB/s"))


def drift(peak, key, what, unit):
    """What to say if it was another after the run than before it, or None."""
    before, after = peak[f"{key}_before"], peak[f"{key}_after"]
    if abs(before - after) <= DRIFT * max(before, after):
        return None
    return (
        f"the {what} was {before:.0f} {unit} before the run and {after:.0f} after it: "
        "something else uses this machine, or its clock changes"
    )


def warnings(run):
    found = [drift(run["peak"], *what) for what in PEAKS if what[0] in run["peak"]]
    found = [text for text in found if text]
    if run["machine"]["load_average"] > 1:
        found.append(f"load average {run['machine']['load_average']:.1f} when the run began")
    noisy = [
        f"{label(run, r)} {direction}"
        for r in run["results"]
        for direction in run["directions"]
        if any(is_noisy(r[direction][x]) for x in ("ratio", "own_ratio") if x in r[direction])
    ]
    if noisy:
        found.append(f"interquartile range of a ratio above {NOISY:.0%} of it: {', '.join(noisy)}")
    return found + [text for result in run["results"] for text in broken(result)]


def notes(run):
    """What to say of torch's ways that took no part: once for each reason, with where."""
    where = {}
    for result in run["results"]:
        for direction in run["directions"]:
            for reason in result[direction].get("skipped", {}).items():
                where.setdefault(reason, []).append(f"{label(run, result)} {direction}")
    return [f"{way} took no part in {', '.join(x)}: {why}" for (way, why), x in where.items()]


def broken(result):
    """What to say of the promises that do not hold."""
    for direction, bounds in result["promised"].items():
        what = result["name"] if direction == "both" else f"{result['name']} {direction}"
        for bound, number in bounds.items():
            if kept(result, direction, bound) is False:
                promised = f"{bound.replace('_', ' ')} {number:g}"
                yield f"{what}: not {promised} {BOUNDS[bound]}, as promised"
