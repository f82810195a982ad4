"""The run as text: one list of columns, for a terminal and for a README."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass

from .report import is_noisy, kept
from .suites import PLAIN_PASS


@dataclass(frozen=True)
class Column:
    """group: what stands above neighbouring columns. cell: result -> text. mean: run -> text of the
    last line."""

    group: str
    title: str
    cell: Callable[[dict], str]
    is_text: bool = False  # flush left
    is_bold: bool = False  # in markdown
    mean: Callable[[dict], str] = lambda run: ""


def columns(run):
    found = [
        Column("", "shape", lambda r: r["name"], is_text=True, mean=mean_title),
        Column("", "B×Hq/Hkv×L×S×D", sizes, is_text=True),
    ]
    of_suite = {
        "grid": grid_columns,
        "options": option_columns,
        "decode": decode_columns,
        "derivatives": derivative_columns,
    }
    return found + of_suite[run["suite"]](run)


def mean_title(run):
    return "geometric mean"


def grid_columns(run):
    return [column for direction in run["directions"] for column in speeds(direction)]


def option_columns(run):
    return [
        *(ratio(direction, "ratio", "× torch") for direction in ("forward", "backward")),
        milliseconds("both", "qkv", "ms"),
        milliseconds("both", "torch", "torch's"),
        ratio("both", "ratio", "× torch (IQR)", is_bold=True, with_spread=True),
        promise("both", "at_least", "≥"),
        ratio("both", "own_ratio", "× own time (IQR)", is_bold=True, with_spread=True),
        promise("both", "at_most", "≤"),
        Column("", "own: that of", lambda r: r["base"] or "", is_text=True),
        Column("", "torch's way", lambda r: r["both"]["way"] or "", is_text=True),
    ]


def decode_columns(run):
    def memory(name, key, form):
        return lambda r: format(r["forward"][name][key], form) if name in r["forward"] else ""

    return [
        Column("", "dtype", lambda r: r["dtype"], is_text=True),
        milliseconds("forward", "qkv", "ms"),
        milliseconds("forward", "torch", "torch's"),
        ratio("forward", "ratio", "× torch (IQR)", is_bold=True, with_spread=True),
        Column("K and V read", "GB/s", memory("qkv", "gbs", ".1f")),
        Column("K and V read", "of memory's", memory("qkv", "share_of_bandwidth", ".0%")),
        Column("K and V read", "torch's", memory("torch", "gbs", ".1f")),
        Column("", "memory, GB/s", lambda r: f"{r['read_gbs']:.1f}"),
        Column("", "threads", lambda r: str(run["machine"]["threads"])),
        Column("", "torch's way", lambda r: r["forward"]["way"] or "", is_text=True),
    ]


ROW = "row"  # the direction of a row that has one, see rows_of()


def derivative_columns(run):
    def base(result):
        direction: str = result["direction"]
        return PLAIN_PASS.get(direction, "")

    def mebibytes(name):
        def cell(result):
            found = result[ROW].get(name, {}).get("extra_bytes")
            return "" if found is None else f"{found / 2**20:.0f}"

        return cell

    return [
        Column("", "dtype", lambda r: r["dtype"], is_text=True),
        Column("", "derivative", lambda r: label(r["direction"]), is_text=True),
        milliseconds(ROW, "qkv", "ms"),
        milliseconds(ROW, "torch", "torch's"),
        ratio(ROW, "ratio", "× torch (IQR)", is_bold=True, with_spread=True),
        promise(ROW, "at_least", "≥"),
        ratio(ROW, "own_ratio", "× own time (IQR)", is_bold=True, with_spread=True),
        promise(ROW, "at_most", "≤"),
        Column("", "own: that of", base, is_text=True),
        Column("", "extra MiB", mebibytes("qkv")),
        Column("", "torch's", mebibytes("torch")),
    ]


def rows_of(run):
    """The results, each a row; of derivatives, each direction of a result."""
    if run["suite"] != "derivatives":
        return run["results"]
    return [
        result | {"direction": d, ROW: result[d], "promised": {ROW: result["promised"].get(d, {})}}
        for result in run["results"]
        for d in run["directions"]
    ]


def sizes(result):
    text = result["shape"].replace("x", "×")
    return text[:-1] + " causal" if text.endswith("c") else text


def speeds(direction):
    def number(name, key, form):
        def cell(result):
            found = result[direction].get(name)
            return format(found[key], form) if found else ""

        return cell

    def mean(run):
        found = run["geometric_mean"][direction]
        return f"{found:.2f}" if found else ""

    return [
        Column(direction, "GFLOP/s", number("qkv", "gflops", ".0f")),
        Column(direction, "torch's", number("torch", "gflops", ".0f")),
        Column(direction, "of peak", number("qkv", "share_of_peak", ".0%")),
        ratio(direction, "ratio", "× torch (IQR)", is_bold=True, with_spread=True, mean=mean),
    ]


def ratio(direction, key, title, with_spread=False, **options):
    def cell(result):
        found = result[direction].get(key)
        if not found:
            return ""
        spread = f" ({found['iqr']:.2f})" if with_spread else ""
        return f"{found['median']:.2f}{'~' if is_noisy(found) else ''}{spread}"

    return Column(label(direction), title, cell, **options)


def milliseconds(direction, name, title):
    def cell(result):
        found = result[direction].get(name)
        if not found:
            return ""
        ms = 1e3 * found["seconds"]["median"]
        return f"{ms:.3g}" if ms < 1000 else f"{ms:.0f}"

    return Column(label(direction), title, cell)


def promise(direction, bound, sign):
    def cell(result):
        holds = kept(result, direction, bound)
        if holds is None:
            return ""
        return f"{sign} {result['promised'][direction][bound]:g}{'' if holds else ' !'}"

    return Column(label(direction), "promised", cell)


LABELS = {
    "both": "forward + backward",
    "double_backward": "second backward",
    "backward_twice": "first + second backward",
    ROW: "",
}


def label(direction: str) -> str:
    return LABELS.get(direction, direction)


def machine_lines(run):
    machine, peak = run["machine"], run["peak"]
    read = f"memory read {peak['read_gbs']:.1f} GB/s"
    if "gflops" in peak:
        read = f"{peak['instruction']} peak {peak['gflops']:.0f} GFLOP/s, {read}"
    return [
        f"{machine['cpu']}, {machine['cores']} cores, {machine['threads']} threads, "
        f"{machine['dtype']}; qkv {machine['qkv']} ({machine['isa']}), "
        f"torch {machine['torch']} ({machine['torch_isa']})",
        read,
    ]


def decode_lines(run):
    """Memory is what limits a decode step, so its rate is what tells."""
    lines = []
    # The suite decode has columns for it.
    is_told = run["suite"] != "decode" and "forward" in run["directions"]
    for result in run["results"] if is_told else ():
        forward = result["forward"]
        if "gbs" not in forward["qkv"]:
            continue
        parts = [
            f"{name} {forward[name]['gbs']:.1f} GB/s ({forward[name]['share_of_bandwidth']:.0%})"
            for name in ("qkv", "torch")
        ]
        lines.append(
            f"{result['name']} forward reads keys and values at: {', '.join(parts)} "
            f"of {result['read_gbs']:.1f} GB/s from memory"
        )
    return lines


def cells(run):
    """Titles, rows and, where a column has a mean, a last row."""
    shown = columns(run)
    rows = [[column.cell(row) for column in shown] for row in rows_of(run)]
    means = [column.mean(run) for column in shown]
    return shown, rows + ([means] if any(means[1:]) else [])


def text(run):
    """For a terminal."""
    shown, rows = cells(run)
    widths = [
        max(len(column.title), *(len(row[i]) for row in rows)) for i, column in enumerate(shown)
    ]
    groups = []
    for group, members in itertools.groupby(zip(shown, widths, strict=True), lambda x: x[0].group):
        groups.append(f"{group:^{sum(width + 2 for _, width in members) - 2}}")

    def line(row):
        parts = zip(shown, row, widths, strict=True)
        return "  ".join(f"{x:{'<' if c.is_text else '>'}{w}}" for c, x, w in parts).rstrip()

    lines = [*machine_lines(run), "", "  ".join(groups).rstrip()]
    lines += [line([column.title for column in shown]), "-" * (sum(widths) + 2 * len(widths) - 2)]
    lines += [line(row) for row in rows] + ["", *decode_lines(run)]
    lines += [f"warning: {warning}" for warning in run["warnings"]]
    return "\n".join(lines).rstrip()


def markdown(run):
    """For a README."""
    shown, rows = cells(run)
    titles = [" ".join(filter(None, (column.group, column.title))) for column in shown]

    def line(row):
        return "| " + " | ".join(row) + " |"

    def bold(x):
        head, _, rest = x.partition(" ")
        return f"**{head}** {rest}".rstrip() if head else ""

    lines = ["  \n".join(machine_lines(run)), "", line(titles)]
    lines.append("|" + "|".join("---" if column.is_text else "--:" for column in shown) + "|")
    for row in rows:
        lines.append(
            line([bold(x) if column.is_bold else x for column, x in zip(shown, row, strict=True)])
        )
    for extra in [*decode_lines(run), *(f"Warning: {warning}" for warning in run["warnings"])]:
        lines += ["", extra]
    return "\n".join(lines)
