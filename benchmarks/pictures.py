"""Runs as pictures: the ratios to torch, and what each suite draws beside them."""

from matplotlib.ticker import FuncFormatter

from .plot import (
    COLORS,
    SMALL,
    SMALLER,
    draw_beside,
    draw_promised,
    draw_shares,
    legend,
    offsets,
)
from .tables import label


def own_time(axes, run):
    """Bars: our time over that of the base; ticks: what is promised."""
    results = run["results"]
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
    legend(axes)


def memory(axes, run):
    """Bars: ours; ticks: torch's."""
    results, directions = run["results"], run["directions"]
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
    legend(axes)


def shares_of_bandwidth(axes, run):
    title = "Reading keys and values: share of the memory's bandwidth"
    draw_shares(axes, run, title, lambda result, found: found["gbs"] / result["read_gbs"])


def shares_of_peak(axes, run):
    title, peak = f"Share of the {run['peak']['instruction']} peak", run["peak"]["gflops"]
    draw_shares(axes, run, title, lambda result, found: found["gflops"] / peak)


BESIDE = {
    "grid": shares_of_peak,
    "options": own_time,
    "derivatives": memory,
    "decode": shares_of_bandwidth,
}


def draw(run, path):
    """Writes the figure to path, in the format that its suffix names."""
    draw_beside(run, path, BESIDE[run["suite"]])
