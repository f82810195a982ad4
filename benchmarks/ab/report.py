"""From the rounds of two builds to ratios, their intervals, and a table for a commit's message."""

import math
import statistics

from qkv.bench.table import Column, Table, machine_line, tabulated

FEWEST_ROUNDS = 6  # of fewer, no two are the ends of such an interval
CONFIDENCE = 0.95
SLOWER = 1.02  # what is surely above this is marked


def interval(samples):
    """(low, median, high): two of the samples, between which the median of what they are drawn from
    lies with a confidence of at least 95 %, whatever its distribution, and their own median."""
    ordered, cut, outside = sorted(samples), 0, 2.0 ** -len(samples)
    while 2 * outside <= 1 - CONFIDENCE:
        cut += 1
        outside += math.comb(len(samples), cut) * 2.0 ** -len(samples)
    return ordered[cut - 1], statistics.median(ordered), ordered[-cut]


def ratios(rounds):
    return [seconds["now"] / seconds["then"] for seconds in rounds]


def row(call, direction, rounds):
    found = {"call": call, "pass": direction, "ratio": interval(ratios(rounds))}
    return found | {n: 1e3 * statistics.median(x[n] for x in rounds) for n in ("then", "now")}


def mark(ratio):
    low, _, high = ratio
    return "slower" if low > SLOWER else "faster" if high < 1 / SLOWER else ""


def between(ratio):
    return f"{ratio[0]:.3f} to {ratio[2]:.3f}"


def table(found):
    """found: what turns.run() returns of the calls."""
    columns = [
        Column("call", lambda r: r["call"], is_text=True),
        Column("pass", lambda r: r["pass"], is_text=True),
        Column("then ms", lambda r: f"{r['then']:.4g}"),
        Column("now ms", lambda r: f"{r['now']:.4g}"),
        Column("now / then", lambda r: f"{r['ratio'][1]:.3f}"),
        Column("95 % interval", lambda r: between(r["ratio"])),
        Column("", lambda r: mark(r["ratio"]), is_text=True),
    ]
    rows = [row(call, direction, rounds) for (call, direction), rounds in found.items()]
    of_rounds = zip(*map(ratios, found.values()), strict=True)
    mean = interval([statistics.geometric_mean(x) for x in of_rounds])
    last = {"call": "geometric mean", "now / then": f"{mean[1]:.3f}", "": mark(mean)}
    if not any(map(mark, [mean, *(r["ratio"] for r in rows)])):
        columns.pop()
    return Table(columns, rows, means=[last | {"95 % interval": between(mean)}])


def text(commits, machine, found, rounds):
    """commits: {"then": name, "now": name}"""
    shown = table(found)
    titles = [column.title for column in shown.columns]
    compared = f"then {commits['then']}, now {commits['now']}; medians of {rounds} rounds"
    parts = [f"{machine_line(machine)}\n{compared}"]
    return "\n\n".join([*parts, tabulated(shown, titles, shown.cells(), "simple")])
