"""python -m benchmarks: the command line."""

import argparse
import sys
from pathlib import Path

from qkv.bench.arguments import expect_folder, expect_modules, make_parser
from qkv.bench.command import command

from .options import SPELLING
from .suites import SUITES

DESCRIPTION = """\
Times qkv's attention against torch's in one process, turn by turn, after checking both against
float64.

grid     attention without options, as `python -m qkv.bench` has it; here it can be drawn.
options  what training adds to attention, each against the fastest of torch's ways to the same
         numbers, and against our own time without it.
derivatives  the jvp, the second backward pass, and both backward passes together, beside torch's
         math path, against our own plain passes, and with the memory that they take beyond the
         inputs. In float32 and bfloat16.
decode   few queries and a long cache of keys and values, none of it in a CPU's cache: GB/s, and
         the share of the memory's bandwidth. In float32, bfloat16 and float16."""


PICTURES = (".png", ".svg", ".pdf")


def main(argv=None):
    parser = make_parser(
        "benchmarks", DESCRIPTION, SUITES, f"{SPELLING}; plain, or for decode cache"
    )
    parser.add_argument("--plot", type=picture, metavar="FILE.png", help="draw the figures")
    return command("benchmarks", SUITES, parser, argv, draw)


def picture(text):
    """The file of --plot. What cannot be drawn is better known before the run than after it."""
    path = Path(text)
    if path.suffix not in PICTURES:
        raise argparse.ArgumentTypeError(f"'{path}' ends in none of {', '.join(PICTURES)}")
    try:
        expect_folder("--plot", path)
        expect_modules("matplotlib")
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return path


def draw(run, args):
    if args.plot:
        from . import pictures  # needs matplotlib, which measuring does not

        pictures.draw(run, args.plot)


if __name__ == "__main__":
    sys.exit(main())
