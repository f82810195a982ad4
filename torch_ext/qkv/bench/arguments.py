"""What the command lines of qkv.bench and of benchmarks/ have in common."""

import argparse
import itertools
import os
import sys
from pathlib import Path

import qkv

from . import machine
from .shapes import SPELLING

DTYPES = ("float32", "float64", "bfloat16", "float16")
SECONDS = 2.0  # for each figure
MEASURING = ("shapes", "dtype", "threads", "isa", "seconds", "repeats", "memory", "json")


def make_parser(package, description, suites, spelling=SPELLING):
    """suites: {name: Suite}; where there are several, --suite takes one."""
    names = "; ".join(f"{name}: {', '.join(known(suite))}" for name, suite in suites.items())
    parser = argparse.ArgumentParser(
        prog=f"python -m {package}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description=description,
        epilog=f"SHAPE is a name ({names}) or {spelling}",
    )
    if len(suites) > 1:
        parser.add_argument("--suite", choices=suites, help="what to measure; see above")
    parser.add_argument("--shapes", metavar="SHAPE,...", help="see below; default: all names")
    default = "; ".join(
        " and ".join(map(machine.name_of, suite.dtypes))
        + (f" for --suite {name}" if len(suites) > 1 else "")
        for name, suite in suites.items()
    )
    parser.add_argument("--dtype", choices=DTYPES, help=f"default: {default}")
    parser.add_argument(
        "--isa", help="hold qkv and torch to this instruction set: avx2, generic ..."
    )
    add_timing(parser, "figure")
    parser.add_argument(
        "--memory",
        action="store_true",
        help="measure what each call takes beyond its inputs too: a process for each figure",
    )
    add_printing(parser)
    parser.add_argument(
        "--compare", type=Path, metavar="OLD.json", help="print what --json wrote then beside it"
    )
    parser.add_argument(
        "--from",
        dest="saved",
        type=Path,
        metavar="RUN.json",
        help="print or compare what --json wrote, and measure nothing",
    )
    return parser


def add_timing(parser, what):
    """On how many threads, and for how long each `what` is measured."""
    parser.add_argument("--threads", type=positive(int), help="default: torch.get_num_threads()")
    length = parser.add_mutually_exclusive_group()
    length.add_argument(
        "--seconds", type=positive(float), help=f"for each {what}; default: {SECONDS:g}"
    )
    length.add_argument("--repeats", type=positive(int), help=f"this many for each {what} instead")


def add_printing(parser):
    parser.add_argument("--markdown", action="store_true", help="print markdown tables")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures")


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


def known(suite):
    return {entry.name: entry for entry in suite.entries}


def choose_entries(suite, text):
    """What --shapes names, or all. Raises ValueError."""
    if text is None:
        return suite.entries
    entries = known(suite)
    try:
        return tuple(entries.get(part) or suite.parse(part) for part in text.split(","))
    except ValueError as error:
        raise ValueError(f"--shapes: {error}; the names are {', '.join(entries)}") from None


def expect_dtypes(entries, dtypes):
    for entry, dtype in itertools.product(entries, dtypes):
        if dtype in entry.how.refuses:
            name = machine.name_of(dtype)
            raise ValueError(f"--dtype {name}: {entry} has no query of this dtype")


def check_outputs(args):
    """What cannot be printed or written is better known before the run than after it."""
    if args.saved:
        expect_none(args, MEASURING)
    expect_folder("--json", args.json)
    expect_modules("tabulate")


def expect_none(args, names):
    """Raises ValueError for options that measure, beside --from, which does not."""
    given = [f"--{name}" for name in names if getattr(args, name)]
    if given:
        raise ValueError(f"--from: measures nothing, expected no {', '.join(given)} beside it")


def expect_folder(option, path):
    if path and not path.parent.is_dir():
        raise ValueError(f"{option}: there is no folder {path.parent}")


def expect_modules(*names):
    for name in names:
        try:
            __import__(name)
        except ImportError:
            raise ValueError(f"{name} is missing: pip install {name}") from None


def confine(parser, isa, package, argv):
    """Holds qkv and torch to `isa`. torch looks at its environment only while it is loaded, so
    this process starts once more if that was not what --isa asks for."""
    if isa is None:
        return
    if isa not in qkv.supported_isas():
        expected = ", ".join(qkv.supported_isas())
        parser.error(f"--isa: this CPU cannot run '{isa}', expected one of: {expected}")
    wanted = machine.environment_for(isa)
    if any(os.environ.get(name) != value for name, value in wanted.items()):
        command = [sys.executable, "-m", package, *argv]
        os.execve(sys.executable, command, os.environ | wanted)
