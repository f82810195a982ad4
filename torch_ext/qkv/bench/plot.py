"""The run as one picture: how many times torch's speed, and how much of the machine's peak."""

from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator, PercentFormatter

from .report import DIRECTIONS, machine_lines

COLORS = {"forward": "#1b6ca8", "backward": "#d1612a"}
OFFSETS = {"forward": -0.19, "backward": 0.19}
POWERS = [2.0**n for n in range(-6, 9)]
BETWEEN = [0.75, 1.25, 1.5, 3, 6]  # more ticks, where the axis is short
SMALL, SMALLER = 9, 8  # points


def draw(run, path):
    """Writes the figure to path, in the format that its suffix names."""
    results = run["results"]
    height = 1.9 + 0.46 * len(results)
    figure = Figure(figsize=(10.5, height), layout="constrained")
    ratios, shares = figure.subplots(1, 2, sharey=True, width_ratios=(1, 1))
    draw_ratios(ratios, run)
    draw_shares(shares, results)
    labels = [
        r["name"] if r["name"] == r["shape"] else f"{r['name']}\n{r['shape']}" for r in results
    ]
    ratios.set_yticks(range(len(results)), labels, fontsize=SMALLER)
    ratios.set_ylim(len(results) - 0.5, -0.5)
    for axes in (ratios, shares):
        axes.grid(axis="x", color="0.9")
        axes.set_axisbelow(True)
        axes.tick_params(axis="y", length=0)
        axes.tick_params(axis="x", labelsize=SMALLER)
        axes.spines[["top", "right", "left"]].set_visible(False)
        for row in range(1, len(results), 2):
            axes.axhspan(row - 0.5, row + 0.5, color="0.965", zorder=0)
    figure.suptitle("\n".join(machine_lines(run)), fontsize=SMALL, x=0.01, ha="left")
    figure.savefig(path, dpi=150)


def draw_ratios(axes, run):
    """Dots: median ratio; bars: its interquartile range; dashes: geometric means."""
    for direction in DIRECTIONS:
        color = COLORS[direction]
        found = [r[direction]["ratio"] for r in run["results"]]
        medians = [ratio["median"] for ratio in found]
        spread = [
            [ratio["median"] - ratio["q1"] for ratio in found],
            [ratio["q3"] - ratio["median"] for ratio in found],
        ]
        rows = [row + OFFSETS[direction] for row in range(len(found))]
        mean = run["geometric_mean"][direction]
        label = f"{direction}, geometric mean {mean:.2f}"
        axes.errorbar(medians, rows, xerr=spread, fmt="o", ms=5, color=color, label=label)
        axes.axvline(mean, color=color, ls="--", lw=1, zorder=1)
        for row, ratio in zip(rows, found, strict=True):
            at = (ratio["q3"], row)
            axes.annotate(
                f"{ratio['median']:.2f}", at, (6, 0), textcoords="offset points", va="center",
                fontsize=SMALLER, color=color,
                bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 0.6},
            )  # fmt: skip
    axes.axvline(1, color="0.2", lw=1.2, zorder=1)
    axes.set_xscale("log", base=2)
    axes.margins(x=0.12)
    left, right = axes.get_xlim()
    axes.xaxis.set_major_locator(FixedLocator(POWERS + BETWEEN if right < 16 * left else POWERS))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:.3g}×"))
    axes.set_title(
        "Speed relative to torch: median and interquartile range", fontsize=SMALL, loc="left"
    )
    axes.legend(
        fontsize=SMALLER, frameon=False, loc="upper left", bbox_to_anchor=(0, -0.06), ncols=2
    )


def draw_shares(axes, results):
    """Bars: ours; ticks: torch's."""
    largest = 1.0
    for direction in DIRECTIONS:
        rows = [row + OFFSETS[direction] for row in range(len(results))]
        ours = [r[direction]["qkv"]["share_of_peak"] for r in results]
        theirs = [r[direction]["torch"]["share_of_peak"] for r in results]
        largest = max(largest, *ours, *theirs)
        axes.barh(rows, ours, height=0.3, color=COLORS[direction], label=f"{direction}, qkv")
        label = "torch" if direction == DIRECTIONS[-1] else None
        axes.plot(theirs, rows, "|", color="0.1", ms=9, mew=1.6, label=label)
    axes.set_xlim(0, largest)
    axes.xaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    axes.set_title("Share of the FMA peak", fontsize=SMALL, loc="left")
    axes.legend(
        fontsize=SMALLER, frameon=False, loc="upper left", bbox_to_anchor=(0, -0.06), ncols=3
    )
