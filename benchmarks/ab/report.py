"""From the rounds of two builds to ratios, their intervals, and a table for a commit's message."""

import math
import statistics

from qkv.bench.machine import line

from ..table import tabulated

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
    found = interval(ratios(rounds))
    then, now = (1e3 * statistics.median(x[name] for x in rounds) for name in ("then", "now"))
    times = {"then ms": f"{then:.4g}", "now ms": f"{now:.4g}"}
    return {"call": call, "pass": direction} | times | compared(found)


def compared(ratio):
    return {"now / then": f"{ratio[1]:.3f}", "95 % interval": between(ratio), "": mark(ratio)}


def mark(ratio):
    low, _, high = ratio
    return "slower" if low > SLOWER else "faster" if high < 1 / SLOWER else ""


def between(ratio):
    return f"{ratio[0]:.3f} to {ratio[2]:.3f}"


def table(found):
    """The rows of what turns.run() returns of the calls; the last column is left out if it is
    empty."""
    rows = [row(call, direction, rounds) for (call, direction), rounds in found.items()]
    of_rounds = zip(*map(ratios, found.values()), strict=True)
    mean = interval([statistics.geometric_mean(x) for x in of_rounds])
    rows.append({"call": "geometric mean"} | compared(mean))
    if any(shown[""] for shown in rows):
        return rows
    return [{title: x for title, x in shown.items() if title} for shown in rows]


def text(commits, machine, found, rounds):
    """commits: {"then": name, "now": name}"""
    about = f"then {commits['then']}, now {commits['now']}; medians of {rounds} rounds"
    rows = tabulated(table(found), left={"call"})
    return f"{line(machine)}\n{about}\n\n{rows}"
