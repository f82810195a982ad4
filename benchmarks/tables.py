"""The tables of each suite."""

from qkv.bench import columns
from qkv.bench.columns import RATIO, ROW, by_direction
from qkv.bench.table import Column, Table

OWN = "× own time (IQR)"


def of_options(run):
    """A row for each option; what is promised is of forward and backward together."""
    shown = [
        *columns.shape(),
        *(columns.ratio(direction, "ratio", "× torch") for direction in ("forward", "backward")),
        columns.milliseconds("both", "qkv", "ms"),
        columns.milliseconds("both", "torch", "torch's"),
        columns.ratio("both", "ratio", RATIO, is_bold=True, with_spread=True),
        columns.promise("both", "at_least", "≥"),
        columns.ratio("both", "own_ratio", OWN, is_bold=True, with_spread=True),
        columns.promise("both", "at_most", "≤"),
        Column("own: that of", lambda r: r["base"] or "", is_text=True),
        Column("torch's way", lambda r: r["both"]["way"] or "", is_text=True),
    ]
    return [Table(shown, run["results"])]


def of_decoding(run):
    """Beside int8 caches, how they compare with caches of the query's dtype."""
    has_own = any("own_ratio" in result["forward"] for result in run["results"])
    own = [columns.ratio(ROW, "own_ratio", OWN, is_bold=True, with_spread=True)] if has_own else []
    shown = [
        *columns.shape(),
        columns.dtype(),
        columns.milliseconds(ROW, "qkv", "ms"),
        columns.milliseconds(ROW, "torch", "torch's"),
        columns.ratio(ROW, "ratio", RATIO, is_bold=True, with_spread=True),
        *own,
        *columns.cache_reads(),
        Column("threads", lambda r: str(run["machine"]["threads"])),
        Column("torch's way", lambda r: r[ROW]["way"] or "", is_text=True),
    ]
    return [Table(shown, by_direction(run, run["results"]))]


def of_derivatives(run):
    shown = [
        *columns.shape(),
        columns.dtype(),
        columns.direction("derivative"),
        columns.milliseconds(ROW, "qkv", "ms"),
        columns.milliseconds(ROW, "torch", "torch's"),
        columns.ratio(ROW, "ratio", RATIO, is_bold=True, with_spread=True),
        columns.promise(ROW, "at_least", "≥"),
        columns.ratio(ROW, "own_ratio", OWN, is_bold=True, with_spread=True),
        columns.promise(ROW, "at_most", "≤"),
        columns.plain_pass(),
        *columns.memory(),
    ]
    return [Table(shown, by_direction(run, run["results"]))]
