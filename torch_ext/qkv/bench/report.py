"""From samples to figures, and from figures to text. A run is a plain dict, as --json writes it:

{"machine": {...}, "peak": {"gflops", "gflops_before", "gflops_after", "read_gbs"},
 "results": [{"name", "shape", "sizes", "check", "forward": D, "backward": D}],
 "geometric_mean": {"forward", "backward"}, "warnings": [...]}

where D is {"calls_per_sample", "repeats", "qkv": C, "torch": C, "ratio": quartiles of torch's
time over ours, pair by pair} and C is {"seconds": quartiles of a call, "samples_s", "gflops",
"share_of_peak"}, for decoding also "gbs" and "share_of_bandwidth".
"""

import dataclasses
import statistics

from .measure import quartiles

DIRECTIONS = ("forward", "backward")
NOISY = 0.1  # interquartile range of a ratio, relative to its median
DRIFT = 0.1  # between the peak before and after the run


def summarize(machine, peak, measured, dtype):
    """measured: (shape, errors, {direction: what measure() returned}) for each shape."""
    results = []
    for shape, errors, timings in measured:
        result = {"name": shape.name, "shape": str(shape), "sizes": dataclasses.asdict(shape)}
        result["check"] = errors
        for direction in DIRECTIONS:
            result[direction] = figures(shape, direction, timings[direction], peak, dtype)
        results.append(result)
    run = {"machine": machine, "peak": peak, "results": results}
    run["geometric_mean"] = {
        direction: statistics.geometric_mean(r[direction]["ratio"]["median"] for r in results)
        for direction in DIRECTIONS
    }
    run["warnings"] = warnings(run)
    return run


def figures(shape, direction, timing, peak, dtype):
    flops = shape.forward_flops if direction == "forward" else shape.backward_flops
    ratios = [t / q for q, t in zip(timing["qkv_s"], timing["torch_s"], strict=True)]
    result = {"calls_per_sample": timing["calls_per_sample"], "repeats": len(ratios)}
    for name in ("qkv", "torch"):
        samples = timing[f"{name}_s"]
        seconds = quartiles(samples)
        gflops = flops / seconds["median"] / 1e9
        result[name] = {
            "seconds": seconds,
            "samples_s": samples,
            "gflops": gflops,
            "share_of_peak": gflops / peak["gflops"],
        }
        if shape.is_decode and direction == "forward":
            gbs = shape.forward_bytes(dtype.itemsize) / seconds["median"] / 1e9
            result[name] |= {"gbs": gbs, "share_of_bandwidth": gbs / peak["read_gbs"]}
    result["ratio"] = quartiles(ratios)
    return result


def is_noisy(figures):
    return figures["ratio"]["iqr"] > NOISY * figures["ratio"]["median"]


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
        for direction in DIRECTIONS
        if is_noisy(r[direction])
    ]
    if noisy:
        found.append(
            f"interquartile range of the ratio above {NOISY:.0%} of it: {', '.join(noisy)}"
        )
    return found


def machine_lines(run):
    machine, peak = run["machine"], run["peak"]
    return [
        f"{machine['cpu']}, {machine['cores']} cores, {machine['threads']} threads, "
        f"{machine['dtype']}; qkv {machine['qkv']} ({machine['isa']}), "
        f"torch {machine['torch']} ({machine['torch_isa']})",
        f"FMA peak {peak['gflops']:.0f} GFLOP/s, memory read {peak['read_gbs']:.1f} GB/s",
    ]


def decode_lines(run):
    """Memory is what limits a decode step, so its rate is what tells."""
    lines = []
    for result in run["results"]:
        forward = result["forward"]
        if "gbs" not in forward["qkv"]:
            continue
        parts = [
            f"{name} {forward[name]['gbs']:.1f} GB/s ({forward[name]['share_of_bandwidth']:.0%})"
            for name in ("qkv", "torch")
        ]
        lines.append(
            f"{result['name']} forward reads keys and values at: {', '.join(parts)} "
            f"of {run['peak']['read_gbs']:.1f} GB/s from memory"
        )
    return lines


def table(run):
    """For a terminal: fixed columns."""
    results = run["results"]
    name_width = max(len("geometric mean"), *(len(r["name"]) for r in results))
    shape_width = max(len("BxHq/HkvxLxSxD"), *(len(r["shape"]) for r in results))
    left = name_width + 2 + shape_width
    columns = f"{'qkv':>8}{'torch':>9}{'% of':>6}  {'x torch':>7} {'+-':>5} "
    units = f"{'GFLOP/s':>8}{'GFLOP/s':>9}{'peak':>6}  {'median':>7} {'IQR':>5} "
    group = len(columns)
    lines = [*machine_lines(run), ""]
    lines.append(" " * left + "".join(f"  {direction:^{group}}" for direction in DIRECTIONS))
    lines.append(" " * left + f"  {columns}" * 2)
    heads = f"{'shape':{name_width}}  {'BxHq/HkvxLxSxD':{shape_width}}"
    lines.append(heads + f"  {units}" * 2)
    lines.append("-" * len(lines[-1]))
    for r in results:
        line = f"{r['name']:{name_width}}  {r['shape']:{shape_width}}"
        for f in (r[direction] for direction in DIRECTIONS):
            line += (
                f"  {f['qkv']['gflops']:8.1f}{f['torch']['gflops']:9.1f}"
                f"{100 * f['qkv']['share_of_peak']:6.0f}  {f['ratio']['median']:7.2f} "
                f"{f['ratio']['iqr']:5.2f}{'~' if is_noisy(f) else ' '}"
            )
        lines.append(line.rstrip())
    mean = run["geometric_mean"]
    line = f"{'geometric mean':{left}}"
    for direction in DIRECTIONS:
        line += f"  {'':{8 + 9 + 6}}  {mean[direction]:7.2f} {'':6}"
    lines += [line.rstrip(), "", *decode_lines(run)]
    lines += [f"warning: {warning}" for warning in run["warnings"]]
    return "\n".join(lines).rstrip()


def markdown(run):
    """The same for a README."""
    titles = ["shape", "B×Hq/Hkv×L×S×D"]
    for direction in DIRECTIONS:
        titles += [f"{direction} GFLOP/s", "torch's", "of peak", "× torch (IQR)"]
    lines = ["  \n".join(machine_lines(run)), "", "| " + " | ".join(titles) + " |"]
    lines.append("|---|---|" + "--:|" * (len(titles) - 2))
    for r in run["results"]:
        cells = [r["name"], r["shape"].removesuffix("c").replace("x", "×")]
        if r["sizes"]["is_causal"]:
            cells[1] += " causal"
        for f in (r[direction] for direction in DIRECTIONS):
            cells += [f"{f['qkv']['gflops']:.0f}", f"{f['torch']['gflops']:.0f}"]
            cells += [f"{f['qkv']['share_of_peak']:.0%}"]
            cells += [f"**{f['ratio']['median']:.2f}** ({f['ratio']['iqr']:.2f})"]
        lines.append("| " + " | ".join(cells) + " |")
    cells = ["geometric mean", ""]
    for direction in DIRECTIONS:
        cells += ["", "", "", f"**{run['geometric_mean'][direction]:.2f}**"]
    lines.append("| " + " | ".join(cells) + " |")
    for line in [*decode_lines(run), *(f"Warning: {warning}" for warning in run["warnings"])]:
        lines += ["", line]
    return "\n".join(lines)
