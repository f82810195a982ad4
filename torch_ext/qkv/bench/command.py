"""The command of one or several suites: python -m qkv.bench, and python -m benchmarks."""

import argparse
import json
import os
import sys
from functools import partial

import torch

from . import compare, saved, table
from .arguments import SECONDS, check_outputs, choose_entries, confine, expect_dtypes
from .check import WrongAnswer
from .machine import name_of
from .run import run_suite


def command(package, suites, parser: argparse.ArgumentParser, argv=None, finish=None):
    """Returns the exit status: 0, or 1 where an answer was wrong. Bad arguments exit with 2.
    package: what python -m takes; suites: {name: Suite}; parser: as make_parser() makes it;
    finish(run, args): what else is done with a run."""
    argv = sys.argv[1:] if argv is None else argv
    args = parser.parse_args(argv)
    if not args.saved:
        confine(parser, args.isa or os.environ.get("QKV_ISA") or None, package, argv)
    try:
        check_outputs(args)
        make_run, then = (reloaded if args.saved else prepared)(args, suites)
    except ValueError as error:
        parser.error(str(error))
    try:
        run = make_run()
    except WrongAnswer as error:
        print(f"refused to time a wrong answer: {error}", file=sys.stderr)
        return 1
    show(run, suites[run["suite"]], then, args)
    if finish:
        finish(run, args)
    return 0


def prepared(args, suites):
    """A function that measures and returns the run, and the run of --compare or None. Raises
    ValueError for arguments that do not fit."""
    names = [args.suite] if getattr(args, "suite", None) else [*suites]
    if len(names) > 1:
        raise ValueError(f"--suite: expected one of {', '.join(names)}")
    suite = suites[names[0]]
    entries = choose_entries(suite, args.shapes)
    dtypes = (getattr(torch, args.dtype),) if args.dtype else suite.dtypes
    expect_dtypes(entries, dtypes)
    planned = {(e.option, str(e.shape), name_of(dtype)) for e in entries for dtype in dtypes}
    then = earlier(args, suite, planned)
    remembered = suite.directions if args.memory else suite.remembered
    if args.threads:
        torch.set_num_threads(args.threads)
    seconds = args.seconds or SECONDS
    return partial(run_suite, suite, entries, dtypes, seconds, args.repeats, remembered), then


def reloaded(args, suites):
    """The same of --from, where the function measures nothing."""
    run = saved.read(args.saved, suites, "--from")
    then = earlier(args, suites[run["suite"]], set(map(compare.key, run["results"])))
    return lambda: run, then


def earlier(args, suite, planned):
    """The run of --compare, or None; planned: the compare.key() of each result beside it."""
    if not args.compare:
        return None
    then = saved.read(args.compare, {suite.name}, "--compare")
    compare.expect_common(planned, then, args.compare)
    return then


def show(run, suite, then, args):
    """Prints the run, beside the run `then` if that is not None, and writes its files."""
    set_as = table.markdown if args.markdown else table.text
    tables = suite.tables(run)
    if then:
        tables.append(compare.table(run, then))
    print(set_as(run, tables))
    if args.json:
        args.json.write_text(json.dumps(run, indent=1, allow_nan=False) + "\n")
