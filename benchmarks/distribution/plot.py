"""Efficiency over hosts, by method and by length, and what one step was measured to take."""

from pathlib import Path

from matplotlib import colormaps
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter, ScalarFormatter

from .table import KI, METHODS, size

COLORS = {"ring": "#1b6ca8", "plain": "#8a8a8a", "heads": "#d1612a", "both": "#3a7d44"}
SMALL, SMALLER = 10, 8  # points
SHOWN = 128 * KI  # tokens: so few that networks and methods differ


def draw(run: dict, path: Path) -> None:
    """Writes the figure, in the format that the path's suffix names."""
    figure = Figure(figsize=(13, 4.4), layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    networks = run["efficiency"]
    draw_methods(left, networks)
    name = list(networks)[-1]
    draw_lengths(middle, name, networks[name])
    draw_steps(right, run["samples"])
    for axes in (left, middle, right):
        axes.grid(color="0.92")
        axes.set_axisbelow(True)
        axes.tick_params(labelsize=SMALLER)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(fontsize=SMALLER, frameon=False)
    figure.suptitle(run["machine"], fontsize=SMALLER, x=0.01, ha="left")
    figure.savefig(path, dpi=150)


def curve(cells: list[dict], tokens: int, method: str) -> tuple[list[int], list[float]]:
    """Hosts, and the efficiency on each."""
    found = {c["hosts"]: c[method] for c in cells if c["tokens"] == tokens and c[method]}
    return list(found), list(found.values())


def draw_methods(axes, networks: dict[str, list[dict]]) -> None:
    styles = dict(zip(networks, ("--", "-", ":", "-."), strict=False))
    for name, cells in networks.items():
        for method, title in METHODS.items():
            label = title if name == list(networks)[-1] else None
            axes.plot(
                *curve(cells, SHOWN, method), styles[name], color=COLORS[method], marker="o", ms=3,
                label=label,
            )  # fmt: skip
        axes.plot([], [], styles[name], color="0.3", label=name)
    over_hosts(axes, f"{size(SHOWN)} tokens")


def draw_lengths(axes, name: str, cells: list[dict]) -> None:
    lengths = sorted({cell["tokens"] for cell in cells})
    for number, tokens in enumerate(lengths):
        color = colormaps["viridis_r"](0.15 + 0.85 * number / len(lengths))
        label = f"{size(tokens)} tokens"
        axes.plot(*curve(cells, tokens, "ring"), color=color, marker="o", ms=3, label=label)
    over_hosts(axes, f"Ring with zigzag, {name}")


def over_hosts(axes, title: str) -> None:
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(ScalarFormatter())
    axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    axes.set_ylim(0, 1.03)
    axes.set_xlabel("hosts", fontsize=SMALLER)
    axes.set_title(title, fontsize=SMALL, loc="left")


def draw_steps(axes, samples: list[dict]) -> None:
    """Lines: measured, forward and backward."""
    kinds = {"compute": "#1b6ca8", "transport": "#d1612a", "both": "#3a7d44"}
    for name, style in (("forward", "--"), ("backward", "-")):
        found = [s for s in samples if s["pass"] == name]
        rows = [s["rows"] for s in found]
        for kind, color in kinds.items():
            label = f"{name}: {kind}" if kind != "both" else f"{name}: both at once"
            seconds = [1e3 * s[kind] for s in found]
            axes.plot(rows, seconds, style, color=color, marker="o", ms=3, label=label)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.xaxis.set_major_formatter(ScalarFormatter())
    axes.yaxis.set_major_formatter(ScalarFormatter())
    axes.set_xlabel("tokens a rank", fontsize=SMALLER)
    axes.set_title("One step on two cores, measured: ms", fontsize=SMALL, loc="left")
