"""What the command lines of this folder have in common, beside what those of qkv.bench have."""

import json
import sys
from pathlib import Path

import torch

from qkv.bench import command, machine
from qkv.bench.shapes import choose

from . import table
from .check import WrongAnswer
from .compare import table as beside
from .run import run_suite


def make_parser(package, description, epilog, dtypes):
    """dtypes: those where --dtype does not say, for --help."""
    parser = command.make_parser(package, description, epilog, dtypes)
    parser.add_argument(
        "--isa", help="hold qkv and torch to this instruction set: avx2, generic ..."
    )
    parser.add_argument(
        "--memory",
        action="store_true",
        help="measure what each call takes beyond its inputs too: a process for each figure",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures")
    parser.add_argument(
        "--compare", type=Path, metavar="OLD.json", help="print what --json wrote then beside it"
    )
    return parser


def choose_entries(suite, text):
    """What --shapes names, or all. Raises ValueError."""
    return choose(text, {entry.name: entry for entry in suite.entries}, suite.parse)


def chosen(suite, args):
    """(entries, dtypes, the compare.key() of each result). Raises ValueError."""
    entries = choose_entries(suite, args.shapes)
    dtypes = (getattr(torch, args.dtype),) if args.dtype else suite.dtypes
    keys = {(e.option, str(e.shape), machine.name_of(dtype)) for e in entries for dtype in dtypes}
    return entries, dtypes, keys


def expect_folder(option, path):
    """What cannot be written is better known before the run than after it. Raises ValueError."""
    if path and not path.parent.is_dir():
        raise ValueError(f"{option}: there is no folder {path.parent}")


def expect_modules(*names):
    for name in names:
        try:
            __import__(name)
        except ImportError:
            raise ValueError(f"{name} is missing: pip install {name}") from None


def measured(suite, entries, dtypes, args):
    """The run; None, said on stderr, where an answer was wrong."""
    if args.threads:
        torch.set_num_threads(args.threads)
    remembered = suite.directions if args.memory else suite.remembered
    try:
        return run_suite(suite, entries, dtypes, args.seconds, args.repeats, remembered)
    except WrongAnswer as error:
        print(f"refused to time a wrong answer: {error}", file=sys.stderr)


def show(run, tables, then, args, as_text=table.text):
    """Prints the tables, and the run beside the run `then` if that is not None; writes --json."""
    print(as_text(run, tables + [beside(run, then)] if then else tables))
    if args.json:
        args.json.write_text(json.dumps(run, indent=1, allow_nan=False) + "\n")
