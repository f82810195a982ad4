"""python -m benchmarks: the command line."""

import sys

from qkv.bench.arguments import make_parser
from qkv.bench.command import command

from .options import SPELLING
from .suites import SUITES

DESCRIPTION = """\
Times qkv's attention against torch's in one process, turn by turn, after checking both against
float64.

options  what training adds to attention, each against the fastest of torch's ways to the same
         numbers, and against our own time without it.
derivatives  the jvp, the second backward pass, and both backward passes together, beside torch's
         math path, against our own plain passes, and with the memory that they take beyond the
         inputs. In float32 and bfloat16.
decode   few queries and a long cache of keys and values, none of it in a CPU's cache: GB/s, and
         the share of the memory's bandwidth. In float32, bfloat16 and float16."""


def main(argv=None):
    parser = make_parser(
        "benchmarks", DESCRIPTION, SUITES, f"{SPELLING}; plain, or for decode cache"
    )
    return command("benchmarks", SUITES, parser, argv)


if __name__ == "__main__":
    sys.exit(main())
