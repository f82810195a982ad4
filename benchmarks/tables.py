"""The tables of each suite, and what is said below them: of promises, and of ways of torch's that
took no part."""

import re

from qkv.bench import machine

from .entry import PLAIN_PASS
from .report import label as of_result
from .table import (
    RATIO,
    cache_reads,
    memory,
    milliseconds,
    of_shape,
    ratio,
    tabulated,
    times,
)
from .table import text as as_text

OWN = "× own time (IQR)"
PROMISED = "promised"
LABELS = {
    "both": "forward + backward",
    "double_backward": "second backward",
    "backward_twice": "first + second backward",
}
LEFT = {"derivative", "own: that of", "torch's way", "model", "B×L", "step", "gain"}
BOUNDS = {
    "at_least": ("ratio", "≥", "times torch's speed"),
    "at_most": ("own_ratio", "≤", "times our own time"),
}


def label(direction: str) -> str:
    return LABELS.get(direction, direction)


def text(run, tables):
    """For a terminal."""
    return as_text(run, tables, notes(run), LEFT)


def markdown(run, tables):
    """For a page; ratios that have a spread are bold, up to that."""
    parts = ["  \n".join(machine.lines(run["machine"], run["peak"]))]
    for caption, rows in tables:
        titles = dict.fromkeys(title for row in rows for title in row)
        bold = {title for title in titles if "(IQR)" in title or title == "now / then"}
        shown = [
            {
                " ".join(t.split()): in_bold(row.get(t, "")) if t in bold else row.get(t, "")
                for t in titles
            }
            for row in rows
        ]
        parts += [caption, narrow(tabulated(shown, "pipe", LEFT))]
    parts += [f"Note: {note}" for note in notes(run)]
    parts += [f"Warning: {warning}" for warning in run["warnings"]]
    return "\n\n".join(filter(None, parts))


def narrow(table):
    """Without what pads its cells."""
    titles, rule, *rows = (re.sub(r" *\| *", " | ", x).strip() for x in table.splitlines())
    rule = re.sub(":?-+(:?)", lambda dashes: f"--{dashes[1] or '-'}", rule)
    return "\n".join([titles, rule, *rows])


def in_bold(x):
    head, _, rest = x.partition(" ")
    return f"**{head}** {rest}".rstrip() if head else ""


def of_options(run):
    """A row for each option; what is promised is of forward and backward together."""

    def titled(title):
        return f"{label('both')}\n{title}"

    def row(result):
        both = result["both"]
        return {
            **of_shape(result),
            "forward\n× torch": ratio(result["forward"]),
            "backward\n× torch": ratio(result["backward"]),
            titled("ms"): milliseconds(both, "qkv"),
            titled("torch's"): milliseconds(both, "torch"),
            titled(RATIO): ratio(both, with_spread=True),
            titled(PROMISED): promise(result, "both", "at_least"),
            titled(OWN): ratio(both, "own_ratio", with_spread=True),
            titled(f"own time {PROMISED}"): promise(result, "both", "at_most"),
            "own: that of": result["base"] or "",
            "torch's way": both["way"] or "",
        }

    return [("", [row(result) for result in run["results"]])]


def of_masks(run):
    """A row for each mask. The share of the plain call's time is to be seen beside the share of the
    pairs that the mask shows: in both passes together, FlexAttention takes no part."""

    def row(result):
        forward, both = result["forward"], result["both"]
        return {
            **of_shape(result),
            **times(forward),
            PROMISED: promise(result, "forward", "at_least"),
            OWN: ratio(forward, "own_ratio", with_spread=True),
            f"{label('both')}\nms": milliseconds(both, "qkv"),
            f"{label('both')}\n{RATIO}": ratio(both, with_spread=True),
            f"{label('both')}\n{OWN}": ratio(both, "own_ratio", with_spread=True),
            "torch's way": forward["way"] or "",
        }

    return [("", [row(result) for result in run["results"]])]


def of_decoding(run):
    """Beside int8 caches, how they compare with caches of the query's dtype."""
    has_own = any("own_ratio" in result["forward"] for result in run["results"])

    def row(result):
        found = result["forward"]
        own = {OWN: ratio(found, "own_ratio", with_spread=True)} if has_own else {}
        return {
            **of_shape(result),
            "dtype": result["dtype"],
            **times(found),
            **own,
            **cache_reads(result, "forward"),
            "threads": str(run["machine"]["threads"]),
            "torch's way": found["way"] or "",
        }

    return [("", [row(result) for result in run["results"]])]


def of_derivatives(run):
    def row(result, direction):
        found = result[direction]
        return {
            **of_shape(result),
            "dtype": result["dtype"],
            "derivative": label(direction),
            **times(found),
            PROMISED: promise(result, direction, "at_least"),
            OWN: ratio(found, "own_ratio", with_spread=True),
            f"own time {PROMISED}": promise(result, direction, "at_most"),
            "own: that of": PLAIN_PASS.get(direction, ""),
            **memory(found),
        }

    return [("", [row(result, d) for result in run["results"] for d in run["directions"]])]


def promise(result, direction, bound):
    holds = kept(result, direction, bound)
    if holds is None:
        return ""
    sign = BOUNDS[bound][1]
    return f"{sign} {result['promised'][direction][bound]:g}{'' if holds else ' !'}"


def kept(result, direction, bound):
    """Whether the promise "at_least" or "at_most" holds; None where there is none."""
    promised = result["promised"].get(direction, {}).get(bound)
    found = result.get(direction, {}).get(BOUNDS[bound][0])
    if promised is None or found is None:
        return None
    return found["median"] >= promised if bound == "at_least" else found["median"] <= promised


def broken(run):
    """What to say of the promises that do not hold."""
    for result in run["results"]:
        for direction, bounds in result.get("promised", {}).items():
            what = result["name"] if direction == "both" else f"{result['name']} {direction}"
            for bound, number in bounds.items():
                if kept(result, direction, bound) is False:
                    promised = f"{bound.replace('_', ' ')} {number:g}"
                    yield f"{what}: not {promised} {BOUNDS[bound][2]}, as promised"


def notes(run):
    """What to say of torch's ways that took no part: once for each reason, with where."""
    where = {}
    for result in run["results"]:
        for direction in run["directions"]:
            for reason in result[direction].get("skipped", {}).items():
                where.setdefault(reason, []).append(f"{of_result(run, result)} {direction}")
    return [f"{way} took no part in {', '.join(x)}: {why}" for (way, why), x in where.items()]
