"""python -m qkv.bench: the command line."""

import argparse
import itertools
import json
import os
import sys
from pathlib import Path

import torch

import qkv

from . import machine, report, table
from .case import Case
from .check import WrongAnswer, check
from .measure import fastest, measure
from .memory import extra_bytes
from .progress import Progress
from .suites import PLAIN_PASS, SPELLING, SUITES

DTYPES = ("float32", "float64", "bfloat16", "float16")
PICTURES = (".png", ".svg", ".pdf")
DESCRIPTION = """\
Times qkv's attention against torch's in one process, turn by turn, after checking both against
float64.

grid     shapes, against scaled_dot_product_attention: GFLOP/s, and the share of the machine's peak.
options  what training adds to attention, each against the fastest of torch's ways to the same
         numbers, and against our own time without it.
derivatives  the jvp, the second backward pass, and both backward passes together, beside torch's
         math path, against our own plain passes, and with the memory that they take beyond the
         inputs. In float32 and bfloat16.
decode   few queries and a long cache of keys and values, none of it in a CPU's cache: GB/s, and
         the share of the memory's bandwidth. In float32, bfloat16 and float16.

Shares are of what this run measures: of the fused multiply-adds (FMA) of the instruction set in
use, or in bfloat16 of its vdpbf16ps (avx512bf16) or tdpbf16ps (amx). A causal shape counts half of
its FLOPs, backward 2.5 times forward's."""


def main(argv=None):
    """Returns the exit status: 0, or 1 where an answer was wrong. Bad arguments exit with 2."""
    argv = sys.argv[1:] if argv is None else argv
    parser = make_parser()
    args = parser.parse_args(argv)
    confine(parser, args.isa, argv)
    try:
        suite = SUITES[args.suite]
        entries = choose_entries(suite, args.shapes)
        check_outputs(args)
    except ValueError as error:
        parser.error(str(error))
    if args.threads:
        torch.set_num_threads(args.threads)
    try:
        dtypes = (getattr(torch, args.dtype),) if args.dtype else suite.dtypes
        run = bench(args.suite, entries, dtypes, args.seconds, args.repeats)
    except WrongAnswer as error:
        print(f"refused to time a wrong answer: {error}", file=sys.stderr)
        return 1
    print(table.markdown(run) if args.markdown else table.text(run))
    if args.json:
        args.json.write_text(json.dumps(run, indent=1, allow_nan=False) + "\n")
    if args.plot:
        from .plot import draw

        draw(run, args.plot)
    return 0


def make_parser():
    names = "; ".join(f"{name}: {', '.join(known(suite))}" for name, suite in SUITES.items())
    parser = argparse.ArgumentParser(
        prog="python -m qkv.bench",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description=DESCRIPTION,
        epilog=f"SHAPE is a name ({names}) or {SPELLING}",
    )
    parser.add_argument("--suite", choices=SUITES, default="grid", help="default: grid")
    parser.add_argument("--shapes", metavar="SHAPE,...", help="see below; default: the suite's")
    parser.add_argument(
        "--dtype",
        choices=DTYPES,
        help="default: float32, for --suite decode all but float64, for --suite derivatives "
        "float32 and bfloat16",
    )
    parser.add_argument("--threads", type=positive(int), help="default: torch.get_num_threads()")
    parser.add_argument(
        "--isa",
        default=os.environ.get("QKV_ISA") or None,
        help="hold qkv and torch to this instruction set: avx512, avx2, generic ...",
    )
    length = parser.add_mutually_exclusive_group()
    length.add_argument(
        "--seconds", type=positive(float), default=2.0, help="for each figure; default: 2"
    )
    length.add_argument("--repeats", type=positive(int), help="this many for each figure instead")
    parser.add_argument("--markdown", action="store_true", help="print a markdown table")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw them")
    return parser


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


def check_outputs(args):
    """What cannot be written is better known before the run than after it."""
    for option, path in (("--json", args.json), ("--plot", args.plot)):
        if path and not path.parent.is_dir():
            raise ValueError(f"{option}: there is no folder {path.parent}")
    if args.plot and args.plot.suffix not in PICTURES:
        raise ValueError(f"--plot: '{args.plot}' ends in none of {', '.join(PICTURES)}")
    for module in ("tqdm", "matplotlib") if args.plot else ("tqdm",):
        try:
            __import__(module)
        except ImportError:
            raise ValueError(f"{module} is missing: pip install {module}") from None


def confine(parser, isa, argv):
    """Holds qkv and torch to `isa`. torch looks at its environment only while it is loaded, so
    this process starts once more if that was not what --isa asks for."""
    if isa is None:
        return
    if isa not in qkv.supported_isas():
        expected = ", ".join(qkv.supported_isas())
        parser.error(f"--isa: this CPU cannot run '{isa}', expected one of: {expected}")
    wanted = machine.environment_for(isa)
    if any(os.environ.get(name) != value for name, value in wanted.items()):
        command = [sys.executable, "-m", __spec__.parent, *argv]
        os.execve(sys.executable, command, os.environ | wanted)


def bench(name, entries, dtypes, seconds, repeats):
    """Measures the machine and every entry for the suite called `name`; returns the run as
    report.py describes it."""
    suite, described = SUITES[name], machine.describe(dtypes)
    peak_of = None if suite.is_decode or len(dtypes) > 1 else dtypes[0]  # each dtype has its own
    measured = []
    with Progress(2 + (1 + len(suite.directions)) * len(entries) * len(dtypes)) as progress:
        before = progress.step("this machine", machine.rates, peak_of)
        for entry, dtype in itertools.product(entries, dtypes):
            case = Case(entry, dtype, suite.has_gradients, suite.has_tangents)
            label = entry.name if len(dtypes) == 1 else f"{entry.name} {machine.name_of(dtype)}"
            errors = progress.long_step(f"{label} check", check, case)
            reads = [machine.read_rate()] if report.reads_memory(entry) else []
            timings = {
                direction: progress.long_step(
                    f"{label} {table.label(direction)}",
                    time,
                    case,
                    direction,
                    seconds,
                    repeats,
                    direction in suite.remembered,
                )  # fmt: skip
                for direction in suite.directions
            }
            if reads:
                reads.append(machine.read_rate())
            measured.append(
                report.Measured(entry, dtype, errors, timings, max(reads, default=None))
            )
            del case  # before there is another one
        after = progress.step("this machine again", machine.rates, peak_of)
    return report.summarize(name, described, machine.best(before, after), measured)


def time(case, direction, seconds, repeats, with_memory, tick):
    """Ours, torch's fastest and our own without the option, in turn: what measure() returns and
    {"way": the fastest, "tried_s": seconds of all, where there are several, "extra_bytes": what
    memory.extra_bytes() returns, if with_memory}."""
    way, tried_s = fastest_way(case, direction)
    memory = extra_bytes(case, direction, way) if with_memory else {}
    calls = {name: call.timed(direction) for name, call in case.calls.items()}
    if direction in PLAIN_PASS:
        calls["base"] = case.calls["qkv"].timed(PLAIN_PASS[direction])
    if way:
        calls["torch"] = case.ways[way].timed(direction)
    found = measure(calls, seconds, repeats, tick)
    return found | {"way": way, "tried_s": tried_s, "extra_bytes": memory}


def fastest_way(case, direction):
    """Its name, or None, and {way: seconds} where there are several."""
    if len(case.ways) < 2:
        return next(iter(case.ways), None), {}
    return fastest({name: call.timed(direction) for name, call in case.ways.items()})


if __name__ == "__main__":
    sys.exit(main())
