"""A command that measures one thing beside another: its arguments, --from, --json, the run and its
tables."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from qkv.bench import machine, threads
from qkv.bench.command import add_timing, new_parser

from . import compare, report
from .arguments import add_saved, expect_default
from .check import WrongAnswer
from .command import expect_folder, expect_modules, show
from .tables import markdown, text

DTYPES = ("float32", "bfloat16")


def add_dtype(parser):
    parser.add_argument("--dtype", choices=DTYPES, help="default: both")


def dtypes_of(args):
    return [getattr(torch, name) for name in ([args.dtype] if args.dtype else DTYPES)]


@dataclass(frozen=True)
class Program:
    """prepare(args) returns (dtypes, a function that returns the results), and raises ValueError
    for bad arguments; the function raises WrongAnswer."""

    name: str  # of the suite, and behind "benchmarks." of the package
    description: str
    add_arguments: Callable  # of a parser
    prepare: Callable
    tables: Callable[[dict], list]  # of a run
    unit: str = "figure"  # that --seconds is for
    direction: str = "time"  # the key of a result under which its times and "ratio" are
    needs: tuple[str, ...] = ()  # modules, to measure

    def main(self, argv=None):
        """Returns the exit status: 0, or 1 where an answer was wrong. Bad arguments exit with 2."""
        parser = new_parser(f"benchmarks.{self.name}", self.description)
        self.add_arguments(parser)
        add_timing(parser, self.unit)
        parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures")
        add_saved(parser)
        args = parser.parse_args(argv)
        try:
            expect_folder("--json", args.json)
            expect_modules("tabulate", "tqdm", *(() if args.saved else self.needs))
            make_run = (self.saved if args.saved else self.prepared)(parser, args)
        except ValueError as error:
            parser.error(str(error))
        if args.threads:
            torch.set_num_threads(args.threads)
        try:
            run = make_run()
        except WrongAnswer as error:
            print(f"refused to time a wrong answer: {error}", file=sys.stderr)
            return 1
        show(run, self.tables(run), None, args, markdown if args.markdown else text)
        return 0

    def saved(self, parser, args):
        expect_default(parser, args, sorted(vars(args).keys() - {"saved", "markdown"}))
        run = compare.read(args.saved, {self.name}, "--from")
        return lambda: run

    def prepared(self, parser, args):
        dtypes, make_results = self.prepare(args)
        return lambda: self.run(dtypes, make_results)

    def run(self, dtypes, make_results):
        """As report.py describes a run, as far as it applies."""
        before = machine.rates(torch.float32)  # and then all threads are there, to be described
        described = {"placement": threads.warning()} | machine.describe(dtypes)
        results = make_results()
        run = {
            "suite": self.name,
            "machine": described,
            "peak": report.best(before, machine.rates(torch.float32)),
            "directions": [self.direction],
            "results": results,
            "geometric_mean": {},
        }
        return run | {"warnings": report.warnings(run)}
