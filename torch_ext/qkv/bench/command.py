"""What the command lines of qkv.bench and of benchmarks/ have in common."""

import argparse
import os
import sys

import qkv

from . import machine

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
