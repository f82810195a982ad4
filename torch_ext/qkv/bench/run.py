"""A run: the machine measured, every answer checked, every call timed."""

import itertools

from . import columns, machine, report
from .case import Case
from .check import check
from .entry import PLAIN_PASS
from .measure import fastest, measure
from .memory import extra_bytes
from .progress import Progress


def run_suite(suite, entries, dtypes, seconds, repeats, remembered):
    """Measures the machine and every entry; returns the run as report.py describes it. remembered:
    the directions whose memory is measured too. Raises WrongAnswer."""
    described = machine.describe(dtypes)
    peak_of = dtypes[0] if suite.has_peak and len(dtypes) == 1 else None  # each dtype has its own
    measured = []
    with Progress(2 + (1 + len(suite.directions)) * len(entries) * len(dtypes)) as progress:
        before = progress.step("this machine", machine.rates, peak_of)
        for entry, dtype in itertools.product(entries, dtypes):
            case = Case(entry, dtype, suite.has_gradients, suite.has_tangents)
            label = entry.name if len(dtypes) == 1 else f"{entry.name} {machine.name_of(dtype)}"
            errors = progress.long_step(f"{label} check", check, case)
            reads = [machine.read_rate()] if entry.reads_memory else []
            timings = {}
            for direction in suite.directions:
                parse = suite.parse if direction in remembered else None
                timings[direction] = progress.long_step(
                    f"{label} {columns.label(direction)}",
                    time, case, direction, seconds, repeats, parse,
                )  # fmt: skip
            if reads:
                reads.append(machine.read_rate())
            measured.append(
                report.Measured(entry, dtype, errors, timings, max(reads, default=None))
            )
            del case  # before there is another one
        after = progress.step("this machine again", machine.rates, peak_of)
    return report.summarize(suite.name, described, machine.best(before, after), measured)


def time(case, direction, seconds, repeats, parse, tick):
    """Ours, torch's fastest and our own without the option, in turn: what measure() returns and
    {"way": the fastest, "tried_s": seconds of all, where there are several, "skipped": {way: why it
    took no part}, "extra_bytes": what memory.extra_bytes() returns, of a suite's parse}."""
    ways, skipped = case.ways_in(direction)
    way, tried_s = fastest_way(ways, direction)
    memory = extra_bytes(case, direction, way, parse) if parse else {}
    calls = {name: call.timed(direction) for name, call in case.calls.items()}
    if direction in PLAIN_PASS:
        calls["base"] = case.calls["qkv"].timed(PLAIN_PASS[direction])
    if way:
        calls["torch"] = ways[way].timed(direction)
    found = measure(calls, seconds, repeats, tick)
    return found | {"way": way, "tried_s": tried_s, "skipped": skipped, "extra_bytes": memory}


def fastest_way(ways, direction):
    """Its name, or None, and {way: seconds} where there are several."""
    if len(ways) < 2:
        return next(iter(ways), None), {}
    return fastest({name: call.timed(direction) for name, call in ways.items()})
