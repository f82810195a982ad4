"""How many times torch's speed, and room beside that: what pictures.py draws on."""

from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator, PercentFormatter

from qkv.bench import machine

from .report import label as result_label
from .tables import label

COLORS = {"forward": "#1b6ca8", "backward": "#d1612a", "both": "#3a7d44"}
COLORS |= {"jvp": "#1b6ca8", "double_backward": "#d1612a", "backward_twice": "#3a7d44"}
POWERS = [2.0**n for n in range(-6, 9)]
BETWEEN = [0.75, 1.25, 1.5, 3, 6]  # more ticks, where the axis is short
SMALL, SMALLER = 9, 8  # points
LEGEND = 72  # characters in SMALLER, for which there is room below one of two axes


def draw_beside(run, path, beside):
    """Writes the figure to path. beside(axes, run) draws the right half, on the rows of the left
    one."""
    results = run["results"]
    height = 1.9 + 0.46 * len(results)
    figure = Figure(figsize=(10.5, height), layout="constrained")
    ratios, right = figure.subplots(1, 2, sharey=True, width_ratios=(1, 1))
    draw_ratios(ratios, run)
    beside(right, run)
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
    figure.suptitle(
        "\n".join(machine.lines(run["machine"], run["peak"])), fontsize=SMALL, x=0.01, ha="left"
    )
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
            if r.get("promised", {}).get(direction, {}).get("at_least")
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
    legend(axes)


def draw_promised(axes, promised):
    """promised: {row: bound}"""
    if not promised:
        return
    rows, bounds = list(promised), list(promised.values())
    axes.plot(bounds, rows, "|", color="0.1", ms=14, mew=1.6, label="promised", zorder=3)


def draw_shares(axes, run, title, share):
    """Bars: ours; ticks: torch's. share(result, what was found of one call)"""
    results, directions, largest = run["results"], run["directions"], 1.0
    for direction, offset in offsets(directions).items():
        rows = [row + offset for row in range(len(results))]
        ours = [share(r, r[direction]["qkv"]) for r in results]
        theirs = {
            row: share(r, r[direction]["torch"])
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
    legend(axes)


def legend(axes):
    """Below the axes, in as many columns as there is room for."""
    labels = axes.get_legend_handles_labels()[1]
    ncols = max(1, LEGEND // (8 + max(map(len, labels))))  # 8: what stands before each
    axes.legend(
        fontsize=SMALLER, frameon=False, loc="upper left", bbox_to_anchor=(0, -0.06), ncols=ncols
    )
