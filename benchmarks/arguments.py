"""What the command lines of this folder have beside those of qkv.bench."""

import itertools
from pathlib import Path

from qkv.bench.machine import name_of

from .entry import Entry


def add_saved(parser):
    parser.add_argument("--markdown", action="store_true", help="print markdown tables")
    parser.add_argument(
        "--from",
        dest="saved",
        type=Path,
        metavar="RUN.json",
        help="print what --json wrote, and measure nothing",
    )


def expect_default(parser, args, names):
    """Raises ValueError for options that measure, beside --from, which does not."""
    given = [name for name in names if getattr(args, name) != parser.get_default(name)]
    if given:
        options = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        raise ValueError(f"--from: measures nothing, expected no {options} beside it")


def expect_dtypes(entries, dtypes):
    for entry, dtype in itertools.product(entries, dtypes):
        if isinstance(entry, Entry) and dtype in entry.how.refuses:
            raise ValueError(f"--dtype {name_of(dtype)}: {entry} has no query of this dtype")
