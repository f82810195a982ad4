"""From samples to figures. A run is a plain dict, as --json writes it:

{"suite": its name, "machine": {...},
 "peak": {"read_gbs", "read_gbs_before", "read_gbs_after"}, and where arithmetic is the limit also
         {"instruction", "gflops", "gflops_before", "gflops_after"},
 "directions": such as "forward" and "backward",
 "results": [{what Entry.described() returns, "dtype", "read_gbs": what the memory gave just before
              or after, where it is the limit, "check", direction: D, ...}],
 "geometric_mean": {direction: of the ratios to torch but for decoding, which memory limits; None
                    for several dtypes}, "warnings": [...]}

where D is {"repeats", what Case.timed() says of torch's way, "qkv": C, "torch": C, "ratio":
quartiles of torch's time over ours, pair by pair} and C is {"seconds": quartiles of a call,
"samples_s", "calls_per_sample", "gflops"}, for decoding also "gbs", of keys and values, and where
memory was measured "extra_bytes". In benchmarks/ there may also be "base": C, another call of ours,
and "own_ratio": of our time over the base's. Where torch has no way, "torch" and "ratio" are
missing.
"""

import statistics

from qkv.bench.measure import quartiles

NOISY = 0.1  # interquartile range of a ratio, relative to its median
DRIFT = 0.1  # between the peak before and after the run
PEAKS = (("gflops", "peak", "GFLOP/s"), ("read_gbs", "read bandwidth", "GB/s"))
RATIOS = {"ratio": ("torch", "qkv"), "own_ratio": ("qkv", "base")}  # whose time over whose


def summarize(suite, machine, peak, directions, results):
    """The run of these results."""
    run = {"suite": suite, "machine": machine, "peak": peak}
    run |= {"directions": [*directions], "results": results}
    run["geometric_mean"] = {direction: mean(run, direction) for direction in directions}
    run["warnings"] = warnings(run)
    return run


def best(before, after):
    """Of two of machine.rates(): the larger, and both as "..._before" and "..._after"."""
    found = {}
    for key, value in before.items():
        if isinstance(value, str):
            found[key] = value
        else:
            found |= {key: max(value, after[key]), f"{key}_before": value}
            found[f"{key}_after"] = after[key]
    return found


def is_decode(result):
    """One query a head: memory, not arithmetic, is the limit."""
    return result["sizes"]["seqlen_q"] == 1


def several_dtypes(run):
    return len({r["dtype"] for r in run["results"]}) > 1


def mean(run, direction):
    if several_dtypes(run):
        return None
    found = [r[direction] for r in run["results"] if not is_decode(r)]
    ratios = [timing["ratio"]["median"] for timing in found if "ratio" in timing]
    return statistics.geometric_mean(ratios) if ratios else None


def figures(entry, dtype, direction, timing, how, extra_bytes):
    """D of what measure() returns. how: what Case.timed() says; extra_bytes: {name: bytes}."""
    taken = timing["samples_s"]
    result: dict = how | {"repeats": len(taken["qkv"])}
    for name, samples in taken.items():
        seconds = quartiles(samples)
        computed, which = entry.timed_as(name, direction)
        result[name] = {
            "seconds": seconds,
            "samples_s": samples,
            "calls_per_sample": timing["calls_per_sample"][name],
            "gflops": computed.flops(which) / seconds["median"] / 1e9,
        }
        if entry.reads_memory and direction == "forward":
            result[name]["gbs"] = computed.cache_bytes(dtype) / seconds["median"] / 1e9
        if name in extra_bytes:
            result[name]["extra_bytes"] = extra_bytes[name]
    for key, (above, below) in RATIOS.items():
        if above in taken and below in taken:
            pairs = zip(taken[above], taken[below], strict=True)
            result[key] = quartiles([x / y for x, y in pairs])
    return result


def label(run, result):
    """Of one result among all."""
    return f"{result['name']} {result['dtype']}" if several_dtypes(run) else result["name"]


def is_noisy(ratio):
    return ratio["iqr"] > NOISY * ratio["median"]


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
    if said := run["machine"].get("placement"):
        found.append(said)
    if run["machine"]["load_average"] > 1:
        found.append(f"load average {run['machine']['load_average']:.1f} when the run began")
    noisy = [
        f"{label(run, r)} {direction}"
        for r in run["results"]
        for direction in run["directions"]
        if any(is_noisy(r[direction][x]) for x in RATIOS if x in r[direction])
    ]
    if noisy:
        found.append(f"interquartile range of a ratio above {NOISY:.0%} of it: {', '.join(noisy)}")
    return found
