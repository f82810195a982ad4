"""The suite of `python -m qkv.bench`: attention without options on shapes as models have them,
against scaled_dot_product_attention."""

from . import table
from .report import is_decode, several_dtypes
from .run import Suite
from .shapes import Entry, Shape

SHAPES = {
    "vit-s": "8x6x197x197x64",
    "bert": "8x12x512x512x64",
    "gpt2": "4x12x1024x1024x64c",
    "base": "1x8x1024x1024x64",
    "long": "1x8x4096x4096x64c",
    "long1h": "1x1x4096x4096x64",
    "llama": "1x32/8x1024x1024x128c",
    "sd-unet": "2x8x4096x4096x40",
    "tiny": "64x4x16x16x32",
    "cross": "4x8x64x1500x64",
    "d256": "1x8x1024x1024x256c",
    "decode1": "1x32/8x1x4096x128",
    "decode": "8x32/8x1x4096x128",
}


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
    tuple(Entry(name, Shape.parse(text)) for name, text in SHAPES.items()),
    ("forward", "backward"),
    parse,
    tables,
)
