"""python -m benchmarks.ab: the command line."""

import argparse
import subprocess
import sys
from dataclasses import replace

import torch

import qkv
from qkv.bench.command import DTYPES, new_parser, positive

from ..arguments import expect_dtypes
from ..command import choose_entries, expect_modules
from ..confined import environment_for
from ..grid import GRID
from ..options import SPELLING, parse
from ..processes import Failed
from ..suites import named
from . import builds, report, turns

DESCRIPTION = """\
Times calls on two builds of qkv, turn by turn: "now", the working tree as it is, and "then", the
commit of --against, which stays built in build/against. Every round has a new process of each. The
ratio is the median of the rounds', with the 95 % interval of that median; a call that is surely
more than 2 % slower, or faster, is marked. Answers are checked against float64 first."""

CALLS = {
    "small": "1x8x16x16x64",
    "tiny": "64x4x16x16x32",
    "vit-s": "8x6x197x197x64",
    "base": "1x8x1024x1024x64",
    "llama": "1x32/8x512x512x128c",
    "cross": "4x8x64x1500x64",
    "dropout": "dropout:1x8x512x512x64",
    "bias": "bias:1x8x512x512x64",
    "window": "window:1x4x2048x2048x64c",
    "varlen": "varlen:16x8x256x256x64",
    "decode": "cache:1x32/8x1x4096x128",
    "int8": "int8:1x32/8x1x4096x128",
}
SUITE = replace(
    GRID, entries=tuple(named(name, parse(text)) for name, text in CALLS.items()), parse=parse
)


def main(argv=None):
    """Returns the exit status: 0, or 1 where there is nothing to compare. Bad arguments exit with
    2."""
    parser = make_parser()
    args = parser.parse_args(argv)
    try:
        expect_modules("tabulate", "tqdm")
        commits = {"then": builds.short_hash(args.against), "now": builds.working_tree()}
        entries = choose_entries(SUITE, args.shapes)
        expect_dtypes(entries, [getattr(torch, args.dtype)])
    except ValueError as error:
        parser.error(str(error))
    try:
        packages = {"now": builds.build_now()}
        packages["then"] = builds.build_then(commits["then"])
        environment = environment_for(args.isa) if args.isa else {}
        found = turns.run(packages, entries, args, environment)
    except (Failed, subprocess.CalledProcessError) as error:
        print(error, file=sys.stderr)
        return 1
    print(report.text(commits, *found, args.rounds))
    return 0


def make_parser():
    epilog = f"SHAPE is a name ({', '.join(CALLS)}) or {SPELLING}"
    parser = new_parser("benchmarks.ab", DESCRIPTION, epilog)
    parser.add_argument("--against", required=True, metavar="COMMIT", help="what is then")
    parser.add_argument("--shapes", metavar="SHAPE,...", help="see below; default: all names")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="default: float32")
    parser.add_argument("--isa", choices=qkv.supported_isas(), help="hold both to it")
    parser.add_argument("--threads", type=positive(int), help="default: torch.get_num_threads()")
    parser.add_argument(
        "--rounds", type=rounds, default=9, help="default: 9; a new process of each build in each"
    )
    parser.add_argument(
        "--seconds", type=positive(float), default=0.1, help="for each turn; default: 0.1"
    )
    return parser


def rounds(text):
    number = positive(int)(text)
    if number < report.FEWEST_ROUNDS:
        raise argparse.ArgumentTypeError(
            f"'{text}', expected at least {report.FEWEST_ROUNDS}: fewer give no 95 % interval"
        )
    return number


if __name__ == "__main__":
    sys.exit(main())
