"""The comparison's pictures."""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # needs no display

import matplotlib.pyplot as plt  # noqa: E402
import numpy as np  # noqa: E402
from matplotlib.patches import Patch, Rectangle  # noqa: E402
from torch import Tensor  # noqa: E402

import qkv.viz  # noqa: E402
from gpt.attention_map import Mentions  # noqa: E402
from gpt.compare import NAMES, SAME_WEIGHTS_LOSS, Comparison, loss_tolerance  # noqa: E402
from gpt.variants import Variant  # noqa: E402

COLORS = {"qkv": "#1f6feb", "torch": "#e8590c"}
SHADES = {"attention forward": 1.0, "attention backward": 0.65, "all else": 0.2}
LINES = {"qkv": {"lw": 3.2, "ls": "-", "alpha": 0.55}, "torch": {"lw": 1.5, "ls": "-"}}
STYLE = {
    "font.size": 11,
    "axes.titlesize": 12,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e5e7eb",
    "legend.frameon": False,
    "figure.dpi": 130,
    "figure.constrained_layout.use": True,
}


def moving_average(values: list[float], width: int) -> np.ndarray:
    """The mean of each entry and those before it: up to `width` in all, fewer near the start, where
    the values fall fast."""
    sums = np.concatenate(([0.0], np.cumsum(values)))
    stop = np.arange(1, len(sums))
    start = stop - np.minimum(width, (stop + 3) // 4)
    return (sums[stop] - sums[start]) / (stop - start)


@plt.rc_context(STYLE)
def plot_losses(comparison: Comparison, title: str, path: Path) -> None:
    figure, (by_step, by_time, difference) = plt.subplots(1, 3, figsize=(16, 4.8))
    width = max(1, len(comparison.runs["qkv"].loss) // 20)
    for name, run in comparison.runs.items():
        smooth = moving_average(run.loss, width)
        steps, seconds = np.arange(1, len(smooth) + 1), np.cumsum(run.step_seconds)
        by_step.plot(steps, smooth, color=COLORS[name], label=name, **LINES[name])
        by_time.plot(seconds, smooth, color=COLORS[name], label=name, lw=2)
        by_time.plot(seconds[-1], smooth[-1], "o", color=COLORS[name], ms=7)
    for axes in (by_step, by_time):
        axes.set_ylabel("training loss, nats per byte")
        axes.set_ylim(top=np.log(256))  # a guess among all bytes; the first steps do worse
        axes.legend()
    mean = f" (mean of {width} steps)" if width > 1 else ""
    by_step.set_title(f"Step by step the same{mean}")
    by_step.set_xlabel("step")
    totals = {name: sum(run.step_seconds) for name, run in comparison.runs.items()}
    saved = totals["torch"] - totals["qkv"]
    order = "sooner" if saved >= 0 else "later"
    by_time.set_title(f"By the clock {abs(saved):.1f} s {order} with qkv")
    by_time.set_xlabel("time in the model's own training steps, s")
    _plot_difference(comparison, difference)
    figure.suptitle(title)
    figure.savefig(path)
    plt.close(figure)


def _plot_difference(comparison: Comparison, axes) -> None:
    losses = [np.array(comparison.runs[name].loss) for name in NAMES]
    gap = np.abs(losses[0] - losses[1])
    steps = np.arange(len(gap))
    floor = 1e-8  # stands for an exact zero on a logarithmic axis
    axes.semilogy(
        steps, np.maximum(gap, floor), ".", ms=3, color="#6b7280", label="the two trainings"
    )
    axes.semilogy(
        steps,
        [loss_tolerance(step) for step in steps],
        color="#6b7280",
        ls="--",
        lw=1,
        label="allowed",
    )
    same = comparison.same_weights
    axes.semilogy(
        [check.step for check in same],
        [max(check.loss, floor) for check in same],
        "D",
        color="#0f766e",
        label="both on the same weights",
    )
    axes.axhline(SAME_WEIGHTS_LOSS, color="#0f766e", ls="--", lw=1, label="allowed")
    axes.set_ylim(floor / 2, 5)
    axes.set_title("|loss on qkv − loss on torch|")
    axes.set_xlabel(f"step (differences under {floor:.0e} drawn there)")
    axes.set_ylabel("nats per byte")
    axes.legend(ncols=2, loc="upper left", fontsize=9)


@plt.rc_context(STYLE)
def plot_times(comparison: Comparison, variants: list[Variant], title: str, path: Path) -> None:
    """Above: a step as it was trained, and every one of them. Below: a step in each variant."""
    figure = plt.figure(figsize=(14, 7.6))
    above, below = figure.subfigures(2, 1, height_ratios=(3, 2))
    parts, timeline = above.subplots(1, 2, width_ratios=(3, 2))
    _plot_parts(comparison, parts)
    _plot_timeline(comparison, timeline)
    each = below.subplots(1, len(variants), squeeze=False)[0]
    for axes, variant in zip(each, variants, strict=True):
        times = {name: {"step": seconds * 1e3} for name, seconds in variant.medians().items()}
        _plot_bars(axes, times, {"step": SHADES["attention backward"]})
        ratio = times["torch"]["step"] / times["qkv"]["step"]
        axes.set_title(f"A step with {variant.name}: torch / qkv = {ratio:.2f}")
    figure.suptitle(title)
    figure.savefig(path)
    plt.close(figure)


def _plot_parts(comparison: Comparison, axes) -> None:
    times = {}
    for name in NAMES:
        times[name] = {part: s * 1e3 for part, s in comparison.medians(name).items()}
        times[name]["all else"] = times[name]["step"] - times[name]["attention"]
    _plot_bars(axes, times, SHADES)
    handles = [Patch(color="#374151", alpha=shade, label=part) for part, shade in SHADES.items()]
    axes.legend(handles=handles, ncols=3, loc="center")
    step, attention = (times["torch"][part] / times["qkv"][part] for part in ("step", "attention"))
    axes.set_title(f"A training step: torch / qkv = {step:.2f}; its attention: {attention:.2f}")


def _plot_bars(axes, times: dict[str, dict[str, float]], shades: dict[str, float]) -> None:
    """A bar for either attention: the milliseconds of its step, with a piece for each of
    `shades`."""
    longest = max(parts["step"] for parts in times.values())
    for row, name in enumerate(NAMES):
        left = 0.0
        for part, shade in shades.items():
            width = times[name][part]
            axes.barh(row, width, 0.62, left, color=COLORS[name], alpha=shade, edgecolor="white")
            if width > 0.05 * longest and len(shades) > 1:  # a shorter one has no room for it
                color = "white" if shade > 0.5 else "black"
                middle = (left + width / 2, row)
                axes.text(*middle, f"{width:.0f}", ha="center", va="center", color=color)
            left += width
        label = f"{times[name]['step']:.0f} ms"
        axes.text(left + 0.01 * longest, row, label, va="center", weight="bold")
    axes.set_yticks(range(len(NAMES)), NAMES, fontsize=13)
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.set_xlim(0, longest * 1.16)
    axes.set_xlabel("milliseconds, medians")


def _plot_timeline(comparison: Comparison, axes) -> None:
    for name, run in comparison.runs.items():
        milliseconds = np.array(run.step_seconds) * 1e3
        axes.plot(milliseconds, ".", ms=3.5, alpha=0.6, color=COLORS[name])
        axes.axhline(
            float(np.median(milliseconds)), color=COLORS[name], lw=2, label=f"{name}, median"
        )
    every = np.concatenate([run.step_seconds for run in comparison.runs.values()]) * 1e3
    # A few stray steps must not flatten the rest; those above the axis are counted in the label.
    top = float(np.percentile(every, 98) * 1.25)
    outside = int((every > top).sum())
    axes.set_ylim(0, top)
    axes.set_title("Every step, the two in turn")
    axes.set_xlabel("step" + (f" ({outside} of {len(every)} lie above)" if outside else ""))
    axes.set_ylabel("milliseconds")
    axes.legend(loc="lower right")


@plt.rc_context(STYLE | {"axes.grid": False})
def plot_attention(maps: Tensor, line: bytes, title: str, path: Path) -> None:
    """`maps`: [layers, heads, query, key] over the telling line `line`. Drawn large is the head
    that looks most from the second mention of the name back to the first."""
    mentions = Mentions.of(line)
    recall = mentions.recall(maps).numpy()
    layer, head = np.unravel_index(int(recall.argmax()), recall.shape)
    # The first byte has only itself to look at; it would set the scale.
    maps = maps.numpy()
    scale = {"cmap": "magma_r", "vmax": np.quantile(maps[:, :, 1:], 0.998)}
    widths = (10, 1.6 * len(maps))  # of the chosen head, and of a column for each layer
    figure = plt.figure(figsize=(sum(widths), 9.6))
    left, right = figure.subfigures(1, 2, width_ratios=widths)
    labels = [{" ": "␣", "\n": "⏎"}.get(character, character) for character in line.decode()]
    large = qkv.viz.plot_attention(maps[layer, head], labels, ax=left.subplots(), **scale)
    large.set_xlabel("byte looked at (key)")
    large.set_ylabel("byte that looks (query), to predict the next")
    large.set_title(
        f"Layer {layer + 1}, head {head + 1}: {recall[layer, head]:.0%} of the second mention's "
        "attention goes to the first (box)",
    )
    corner = (mentions.first - 0.5, mentions.second - 0.5)
    size = (mentions.length, mentions.length)
    large.add_patch(Rectangle(corner, *size, fill=False, ec=COLORS["qkv"], lw=1.5))
    small = right.subplots(*reversed(maps.shape[:2]), squeeze=False)  # a row for each head
    for j, i in np.ndindex(*small.shape):
        small[j, i].imshow(maps[i, j], vmin=0, **scale)
        small[j, i].set(xticks=[], yticks=[])
        chosen = (i, j) == (layer, head)
        for spine in small[j, i].spines.values():
            spine.set(visible=True, color=COLORS["qkv"] if chosen else "#9ca3af")
            spine.set_linewidth(3 if chosen else 0.8)
    for i, axes in enumerate(small[0]):
        axes.set_title(f"layer {i + 1}", fontsize=9, weight="normal")
    for j, axes in enumerate(small[:, 0]):
        axes.set_ylabel(f"head {j + 1}", fontsize=9)
    right.suptitle("All heads on the same line", fontsize=12)
    figure.suptitle(title)
    figure.savefig(path)
    plt.close(figure)
