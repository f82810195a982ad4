"""What the command lines of qkv.bench and of benchmarks/ have in common."""

import argparse
import json
import os
import sys
from pathlib import Path

import torch

import qkv

from . import machine, table
from .check import WrongAnswer
from .compare import table as beside
from .run import run_suite

DTYPES = ("float32", "float64", "bfloat16", "float16")
SECONDS = 2.0  # for each figure


def new_parser(package, description, epilog=None):
    """Whose texts are printed as they are."""
    return argparse.ArgumentParser(
        prog=f"python -m {package}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description=description,
        epilog=epilog,
    )


def make_parser(package, description, epilog, dtypes="float32"):
    """dtypes: those where --dtype does not say, for --help."""
    parser = new_parser(package, description, epilog)
    parser.add_argument("--shapes", metavar="SHAPE,...", help="see below; default: all names")
    parser.add_argument("--dtype", choices=DTYPES, help=f"default: {dtypes}")
    parser.add_argument(
        "--isa", help="hold qkv and torch to this instruction set: avx2, generic ..."
    )
    add_timing(parser, "figure")
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


def add_timing(parser, what):
    """On how many threads, and for how long each `what` is measured."""
    parser.add_argument("--threads", type=positive(int), help="default: torch.get_num_threads()")
    length = parser.add_mutually_exclusive_group()
    length.add_argument(
        "--seconds",
        type=positive(float),
        default=SECONDS,
        help=f"for each {what}; default: {SECONDS:g}",
    )
    length.add_argument("--repeats", type=positive(int), help=f"this many for each {what} instead")


def positive(kind):
    def parse(text):
        try:
            value = kind(text)
        except ValueError:
            value = 0
        if not value > 0:
            raise argparse.ArgumentTypeError(f"'{text}', expected a positive {kind.__name__}")
        return value

    return parse


def choose_entries(suite, text):
    """What --shapes names, or all. Raises ValueError."""
    if text is None:
        return suite.entries
    entries = {entry.name: entry for entry in suite.entries}
    try:
        return tuple(entries.get(part) or suite.parse(part) for part in text.split(","))
    except ValueError as error:
        raise ValueError(f"--shapes: {error}; the names are {', '.join(entries)}") from None


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


def confine(parser, isa, package, argv):
    """Holds qkv and torch to `isa`, or to what QKV_ISA says. torch looks at its environment only
    while it is loaded, so this process starts once more if that was not what is asked for."""
    isa = isa or os.environ.get("QKV_ISA")
    if not isa:
        return
    if isa not in qkv.supported_isas():
        expected = ", ".join(qkv.supported_isas())
        parser.error(f"--isa: this CPU cannot run '{isa}', expected one of: {expected}")
    wanted = machine.environment_for(isa)
    if any(os.environ.get(name) != value for name, value in wanted.items()):
        command = [sys.executable, "-m", package, *argv]
        os.execve(sys.executable, command, os.environ | wanted)


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
