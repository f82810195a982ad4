"""The run as one picture: how many times torch's speed, and how much of the machine's peak or, for
options, how many times our own time without them."""

from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator, PercentFormatter

from .report import label as result_label
from .table import label, machine_lines

COLORS = {"forward": "#1b6ca8", "backward": "#d1612a", "both": "#3a7d44"}
COLORS |= {"jvp": "#1b6ca8", "double_backward": "#d1612a", "backward_twice": "#3a7d44"}
POWERS = [2.0**n for n in range(-6, 9)]
BETWEEN = [0.75, 1.25, 1.5, 3, 6]  # more ticks, where the axis is short
SMALL, SMALLER = 9, 8  # points


def draw(run, path):
    """Writes the figure to path, in the format that its suffix names."""
    results, directions = run["results"], run["directions"]
    height = 1.9 + 0.46 * len(results)
    figure = Figure(figsize=(10.5, height), layout="constrained")
    ratios, right = figure.subplots(1, 2, sharey=True, width_ratios=(1, 1))
    draw_ratios(ratios, run)
    if "both" in directions:
        draw_own(right, results)
    elif run["suite"] == "derivatives":
        draw_memory(right, results, directions)
    elif "gflops" in run["peak"]:
        title = f"Share of the {run['peak']['instruction']} peak"
        draw_shares(right, results, directions, "share_of_peak", title)
    else:
        title = "Reading keys and values: share of the memory's bandwidth"
        draw_shares(right, results, directions, "share_of_bandwidth", title)
    labels = [
        name if r["name"].endswith(r["shape"]) else f"{name}\n{r['shape']}"
        for r, name in ((r, result_label(run, r)) for r in results)
    ]
    ratios.set_yticks(range(len(results)), labels, fontsize=SMALLER)
    ratios.set_ylim(len(results) - 0.5, -0.5)
    for axes in (ratios, right):
        axes.grid(axis="x", color="0.9")
        axes.set_axisbelow(True)
        axes.tick_params(axis="y", length=0)
        axes.tick_params(axis="x", labelsize=SMALLER)
        axes.spines[["top", "right", "left"]].set_visible(False)
        for row in range(1, len(results), 2):
            axes.axhspan(row - 0.5, row + 0.5, color="0.965", zorder=0)
    figure.suptitle("\n".join(machine_lines(run)), fontsize=SMALL, x=0.01, ha="left")
    figure.savefig(path, dpi=150)


def offsets(directions):
    """{direction: where in its row}"""
    step = 0.76 / len(directions)
    return {d: step * (i - (len(directions) - 1) / 2) for i, d in enumerate(directions)}


def draw_ratios(axes, run):
    """Dots: median ratio; bars: its interquartile range; dashes: geometric means."""
    directions = run["directions"]
    for direction, offset in offsets(directions).items():
        color = COLORS[direction]
        found = {i: r[direction].get("ratio") for i, r in enumerate(run["results"])}
        found = {i + offset: ratio for i, ratio in found.items() if ratio}
        medians = [ratio["median"] for ratio in found.values()]
        spread = [
            [ratio["median"] - ratio["q1"] for ratio in found.values()],
            [ratio["q3"] - ratio["median"] for ratio in found.values()],
        ]
        name, mean = label(direction), run["geometric_mean"][direction]
        if mean and "both" not in directions:  # over options it would mean nothing
            axes.axvline(mean, color=color, ls="--", lw=1, zorder=1)
            name = f"{name}, geometric mean {mean:.2f}"
        axes.errorbar(medians, list(found), xerr=spread, fmt="o", ms=5, color=color, label=name)
        for row, ratio in found.items():
            at = (ratio["q3"], row)
            axes.annotate(
                f"{ratio['median']:.2f}", at, (6, 0), textcoords="offset points", va="center",
                fontsize=SMALLER, color=color,
                bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 0.6},
            )  # fmt: skip
    draw_promised(
        axes,
        {
            i + row: r["promised"][direction]["at_least"]
            for i, r in enumerate(run["results"])
            for direction, row in offsets(directions).items()
            if r["promised"].get(direction, {}).get("at_least")
        },
    )
    axes.axvline(1, color="0.2", lw=1.2, zorder=1)
    axes.set_xscale("log", base=2)
    axes.margins(x=0.12)
    left, right = axes.get_xlim()
    axes.xaxis.set_major_locator(FixedLocator(POWERS + BETWEEN if right < 8 * left else POWERS))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:.3g}×"))
    axes.set_title(
        "Speed relative to torch: median and interquartile range", fontsize=SMALL, loc="left"
    )
    legend(axes, ncols=len(directions) + 1)


def draw_promised(axes, promised):
    """promised: {row: bound}"""
    if not promised:
        return
    rows, bounds = list(promised), list(promised.values())
    axes.plot(bounds, rows, "|", color="0.1", ms=14, mew=1.6, label="promised", zorder=3)


def draw_own(axes, results):
    """Bars: our time over that of the base; ticks: what is promised."""
    rows = [i for i, r in enumerate(results) if "own_ratio" in r["both"]]
    found = [results[i]["both"]["own_ratio"]["median"] for i in rows]
    axes.barh(rows, found, height=0.5, color=COLORS["both"], label=f"{label('both')}, qkv")
    promised = {i: results[i]["promised"].get("both", {}).get("at_most") for i in rows}
    promised = {i: bound for i, bound in promised.items() if bound}
    draw_promised(axes, promised)
    for row, ratio in zip(rows, found, strict=True):
        at = (max(ratio, promised.get(row, 0)), row)
        axes.annotate(
            f"{ratio:.2f} × {results[row]['base']}", at, (6, 0), textcoords="offset points",
            va="center", fontsize=SMALLER, color=COLORS["both"],
        )  # fmt: skip
    axes.margins(x=0.25)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:.3g}×"))
    axes.set_title("Our time relative to our own without the option", fontsize=SMALL, loc="left")
    legend(axes, ncols=2)


def draw_memory(axes, results, directions):
    """Bars: ours; ticks: torch's."""
    found = [d for d in directions if "extra_bytes" in results[0][d]["qkv"]]
    for direction in found:
        rows = [row + offsets(directions)[direction] for row in range(len(results))]
        ours, theirs = (
            {
                row: max(r[direction][name]["extra_bytes"] / 2**20, 1)  # the axis is logarithmic
                for row, r in zip(rows, results, strict=True)
                if name in r[direction]
            }
            for name in ("qkv", "torch")
        )
        color, name = COLORS[direction], label(direction)
        axes.barh(list(ours), ours.values(), height=0.24, color=color, label=f"{name}, qkv")
        last = "torch" if direction == found[-1] else None
        axes.plot(theirs.values(), theirs.keys(), "|", color="0.1", ms=9, mew=1.6, label=last)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
    axes.set_title("Memory beyond the inputs, at its peak: MiB", fontsize=SMALL, loc="left")
    legend(axes, ncols=3)


def draw_shares(axes, results, directions, key, title):
    """Bars: ours; ticks: torch's."""
    largest = 1.0
    for direction, offset in offsets(directions).items():
        rows = [row + offset for row in range(len(results))]
        ours = [r[direction]["qkv"][key] for r in results]
        theirs = {
            row: r[direction]["torch"][key]
            for row, r in zip(rows, results, strict=True)
            if "torch" in r[direction]
        }
        largest = max(largest, *ours, *theirs.values())
        axes.barh(rows, ours, height=0.3, color=COLORS[direction], label=f"{direction}, qkv")
        name = "torch" if direction == directions[-1] else None
        axes.plot(theirs.values(), theirs.keys(), "|", color="0.1", ms=9, mew=1.6, label=name)
    axes.set_xlim(0, largest)
    axes.xaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    axes.set_title(title, fontsize=SMALL, loc="left")
    legend(axes, ncols=3)


def legend(axes, ncols):
    axes.legend(
        fontsize=SMALLER, frameon=False, loc="upper left", bbox_to_anchor=(0, -0.06), ncols=ncols
    )
