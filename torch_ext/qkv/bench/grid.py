"""The suite of `python -m qkv.bench`: attention without options on shapes as models have them,
against scaled_dot_product_attention."""

from . import columns
from .columns import RATIO, ROW, by_direction
from .entry import Entry
from .report import is_decode, several_dtypes
from .shapes import Shape
from .suite import Suite
from .table import Table

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
        shown = [*of_shape(run), *times(), *columns.speed(), *errors_and_memory(run)]
        means = [
            {"shape": "geometric mean", "pass": columns.label(direction), RATIO: f"{mean:.2f}"}
            for direction, mean in run["geometric_mean"].items()
            if mean
        ]
        found.append(Table(shown, by_direction(run, prefill), means=means))
    if decode:
        shown = [*of_shape(run), *times(), *columns.cache_reads(), *errors_and_memory(run)]
        title = "One query a head: the time goes into reading keys and values from memory."
        found.append(Table(shown, by_direction(run, decode), title))
    return found


def of_shape(run):
    dtype = [columns.dtype()] if several_dtypes(run) else []
    return [*columns.shape(), *dtype, columns.direction("pass")]


def times():
    return [
        columns.milliseconds(ROW, "qkv", "ms"),
        columns.milliseconds(ROW, "torch", "torch's ms"),
        columns.ratio(ROW, "ratio", RATIO, is_bold=True, with_spread=True),
    ]


def errors_and_memory(run):
    return [*columns.errors(), *(columns.memory() if columns.has_memory(run) else [])]


GRID = Suite(
    "grid",
    tuple(Entry(name, Shape.parse(text)) for name, text in SHAPES.items()),
    ("forward", "backward"),
    parse,
    tables,
)
