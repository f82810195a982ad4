"""From samples to figures. A run is a plain dict, as --json writes it:

{"machine": {...}, "peak": {"gflops", "gflops_before", "gflops_after", "read_gbs"},
 "directions": of "forward", "backward", "both",
 "results": [{"name", "shape", "option", "sizes", "base": whose time ours is compared with,
              or None, "promised": of "both": {"at_least": times torch's speed, or None,
              "at_most": times our own time, or None},
              "check", "forward": D, "backward": D, "both": D}],
 "geometric_mean": {direction: of the ratios to torch}, "warnings": [...]}

where D is {"calls_per_sample", "repeats", "way": torch's that was fastest, "tried_s": {way: s} of
several, "qkv": C, "torch": C, "base": C, "ratio": quartiles of torch's time over ours, pair by
pair, "own_ratio": of our time over the base's} and C is {"seconds": quartiles of a call,
"samples_s", "gflops", "share_of_peak"}, for decoding also "gbs" and "share_of_bandwidth". Where
torch has no way, or nothing is the base, "torch" and "ratio", or "base" and "own_ratio", are
missing.
"""

import dataclasses
import statistics

from .measure import quartiles

NOISY = 0.1  # interquartile range of a ratio, relative to its median
DRIFT = 0.1  # between the peak before and after the run


def summarize(machine, peak, measured, dtype):
    """measured: (entry, errors, {direction: what time() returned}) for each entry."""
    results = []
    for entry, errors, timings in measured:
        result = {"name": entry.name, "shape": str(entry.shape), "option": entry.option}
        result["sizes"] = dataclasses.asdict(entry.shape)
        result["base"] = entry.base and entry.base.name
        result["promised"] = {"at_least": entry.at_least, "at_most": entry.at_most}
        result["check"] = errors
        for direction, timing in timings.items():
            result[direction] = figures(entry, direction, timing, peak, dtype)
        results.append(result)
    directions = list(measured[0][2])
    run = {"machine": machine, "peak": peak, "directions": directions, "results": results}
    run["geometric_mean"] = {direction: mean(results, direction) for direction in directions}
    run["warnings"] = warnings(run)
    return run


def mean(results, direction):
    ratios = [r[direction]["ratio"]["median"] for r in results if "ratio" in r[direction]]
    return statistics.geometric_mean(ratios) if ratios else None


def figures(entry, direction, timing, peak, dtype):
    taken = timing["samples_s"]
    result = {"calls_per_sample": timing["calls_per_sample"], "repeats": len(taken["qkv"])}
    result |= {"way": timing["way"], "tried_s": timing["tried_s"]}
    for name, samples in taken.items():
        computed = entry.base if name == "base" else entry
        seconds = quartiles(samples)
        gflops = computed.flops(direction) / seconds["median"] / 1e9
        result[name] = {
            "seconds": seconds,
            "samples_s": samples,
            "gflops": gflops,
            "share_of_peak": gflops / peak["gflops"],
        }
        if entry.option == "plain" and entry.shape.is_decode and direction == "forward":
            gbs = entry.shape.forward_bytes(dtype.itemsize) / seconds["median"] / 1e9
            result[name] |= {"gbs": gbs, "share_of_bandwidth": gbs / peak["read_gbs"]}
    if "torch" in taken:
        pairs = zip(taken["torch"], taken["qkv"], strict=True)
        result["ratio"] = quartiles([torch / ours for torch, ours in pairs])
    if "base" in taken:
        pairs = zip(taken["base"], taken["qkv"], strict=True)
        result["own_ratio"] = quartiles([ours / base for base, ours in pairs])
    return result


def is_noisy(ratio):
    return ratio["iqr"] > NOISY * ratio["median"]


def kept(result, bound):
    """Whether the promise "at_least" or "at_most" holds; None where there is none."""
    promised = result["promised"].get(bound)
    found = result.get("both", {}).get({"at_least": "ratio", "at_most": "own_ratio"}[bound])
    if promised is None or found is None:
        return None
    return found["median"] >= promised if bound == "at_least" else found["median"] <= promised


def warnings(run):
    found = []
    before, after = run["peak"]["gflops_before"], run["peak"]["gflops_after"]
    if abs(before - after) > DRIFT * max(before, after):
        found.append(
            f"the FMA peak was {before:.0f} GFLOP/s before the run and {after:.0f} after it: "
            "something else uses this machine, or its clock changes"
        )
    if run["machine"]["load_average"] > 1:
        found.append(f"load average {run['machine']['load_average']:.1f} when the run began")
    noisy = [
        f"{r['name']} {direction}"
        for r in run["results"]
        for direction in run["directions"]
        if any(is_noisy(r[direction][x]) for x in ("ratio", "own_ratio") if x in r[direction])
    ]
    if noisy:
        found.append(f"interquartile range of a ratio above {NOISY:.0%} of it: {', '.join(noisy)}")
    for result in run["results"]:
        for bound, what in (("at_least", "times torch's speed"), ("at_most", "times our own time")):
            if kept(result, bound) is False:
                promised = f"{bound.replace('_', ' ')} {result['promised'][bound]:g}"
                found.append(f"{result['name']}: not {promised} {what}, as promised")
    return found
