"""python -m benchmarks: the command line."""

import argparse
import sys
from pathlib import Path

from qkv.bench.machine import name_of

from . import compare
from .arguments import add_saved, expect_default, expect_dtypes
from .command import chosen, expect_folder, expect_modules, make_parser, measured, show
from .confined import confine
from .options import SPELLING
from .suites import SUITES
from .tables import broken, markdown, text

DESCRIPTION = """\
Times qkv's attention against torch's in one process, turn by turn, after checking both against
float64.

grid     attention without options on the shapes of `python -m qkv.bench`, with more figures.
options  what training adds to attention, each against the fastest of torch's ways to the same
         numbers, and against our own time without it.
masks    masks as models write them, as spans: against FlexAttention compiled and SDPA with a
         boolean mask, and against our own time without a mask.
derivatives  the jvp, the second backward pass, and both backward passes together, beside torch's
         math path, against our own plain passes, and with the memory that they take beyond the
         inputs. In float32 and bfloat16.
decode   few queries and a long cache of keys and values, none of it in a CPU's cache: GB/s, and
         the share of the memory's bandwidth. In float32, bfloat16 and float16."""


PICTURES = (".png", ".svg", ".pdf")
MEASURING = ("shapes", "dtype", "threads", "isa", "seconds", "repeats", "memory", "json")


def main(argv=None):
    """Returns the exit status: 0, or 1 where an answer was wrong. Bad arguments exit with 2."""
    argv = sys.argv[1:] if argv is None else argv
    parser = suites_parser()
    args = parser.parse_args(argv)
    if not args.saved:
        confine(parser, args.isa, argv)
    try:
        expect_folder("--json", args.json)
        expect_modules("tabulate", "tqdm")
        suite, keys, make_run = (reloaded if args.saved else prepared)(parser, args)
        then = compare.earlier(args.compare, suite, keys)
    except ValueError as error:
        parser.error(str(error))
    run = make_run()
    if run is None:
        return 1
    show(run, suite.tables(run), then, args, markdown if args.markdown else text)
    if args.plot:
        from . import pictures  # needs matplotlib, which measuring does not

        pictures.draw(run, args.plot)
    return 0


def suites_parser():
    names = "; ".join(
        f"{name}: {', '.join(e.name for e in suite.entries)}" for name, suite in SUITES.items()
    )
    epilog = f"SHAPE is a name ({names}) or {SPELLING}; plain, or for decode cache"
    dtypes = "; ".join(
        f"{' and '.join(map(name_of, suite.dtypes))} for --suite {name}"
        for name, suite in SUITES.items()
    )
    parser = make_parser("benchmarks", DESCRIPTION, epilog, dtypes)
    parser.add_argument("--suite", choices=SUITES, help="what to measure; see above")
    add_saved(parser)
    parser.add_argument("--plot", type=picture, metavar="FILE.png", help="draw the figures")
    return parser


def reloaded(parser, args):
    """(suite, the compare.key() of each result, a function that returns the run) of --from. Raises
    ValueError."""
    expect_default(parser, args, MEASURING)
    run = compare.read(args.saved, SUITES, "--from")
    return SUITES[run["suite"]], set(map(compare.key, run["results"])), lambda: run


def prepared(parser, args):
    """The same, where the function measures. It returns None where an answer was wrong."""
    if not args.suite:
        raise ValueError(f"--suite: expected one of {', '.join(SUITES)}")
    suite = SUITES[args.suite]
    entries, dtypes, keys = chosen(suite, args)
    expect_dtypes(entries, dtypes)

    def make_run():
        run = measured(suite, entries, dtypes, args)
        if run:
            run["warnings"] += broken(run)
        return run

    return suite, keys, make_run


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


if __name__ == "__main__":
    sys.exit(main())
