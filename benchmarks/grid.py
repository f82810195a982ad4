"""The suite of the shapes of `python -m qkv.bench`: attention without options, against
scaled_dot_product_attention."""

from qkv.bench.shapes import GRID as SHAPES
from qkv.bench.shapes import Shape

from . import table
from .entry import Entry
from .report import is_decode, several_dtypes
from .run import Suite


def parse(text):
    """The Entry of a shape as SPELLING has it. Raises ValueError."""
    return Entry(text, Shape.parse(text))


def tables(run):
    """The shapes; those with one query a head, which memory limits, in a table of their own."""
    prefill = [r for r in run["results"] if not is_decode(r)]
    decode = [r for r in run["results"] if is_decode(r)]
    found = []
    if prefill:
        means = [
            {"shape": "geometric mean", "pass": direction, table.RATIO: f"{mean:.2f}"}
            for direction, mean in run["geometric_mean"].items()
            if mean
        ]
        found.append(("", rows(run, prefill) + means))
    if decode:
        title = "One query a head: the time goes into reading keys and values from memory."
        found.append((title, rows(run, decode)))
    return found


def rows(run, results):
    return [row(run, result, direction) for result in results for direction in run["directions"]]


def row(run, result, direction):
    found = result[direction]
    shown = table.of_shape(result)
    if several_dtypes(run):
        shown["dtype"] = result["dtype"]
    shown |= {"pass": direction} | table.times(found)
    if is_decode(result):
        shown |= table.cache_reads(result, direction)
    else:
        shown |= table.speed(found, run["peak"])
    shown |= table.errors(result, direction)
    return shown | (table.memory(found) if table.has_memory(run) else {})


GRID = Suite(
    "grid",
    tuple(Entry(name, shape) for name, shape in SHAPES.items()),
    ("forward", "backward"),
    parse,
    tables,
)
