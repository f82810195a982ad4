"""A run: the machine measured, every answer checked, every call timed."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch

from qkv.bench import machine, threads
from qkv.bench.measure import measure

from . import report
from .case import Case
from .check import check
from .entry import Entry
from .memory import extra_bytes


@dataclass(frozen=True)
class Suite:
    """What one command measures, and how it shows that."""

    name: str
    entries: tuple[Entry, ...]
    directions: tuple[str, ...]  # of those that Call.timed() knows
    parse: Callable[[str], Entry]  # text of --shapes; raises ValueError
    # Of a run, as report.py describes it: (caption, rows), a row is {title: text}.
    tables: Callable[[dict], list[tuple[str, list[dict[str, str]]]]]
    case: Callable[[Entry, torch.dtype], Case] = Case
    dtypes: tuple[torch.dtype, ...] = (torch.float32,)  # where --dtype does not say
    has_peak: bool = True  # arithmetic is the limit; else memory
    remembered: tuple[str, ...] = ()  # the directions whose memory is always measured


def run_suite(suite, entries, dtypes, seconds, repeats, remembered):
    """Measures the machine and every entry; returns the run as report.py describes it. remembered:
    the directions whose memory is measured too. Raises WrongAnswer."""
    from tqdm import tqdm  # which only a run needs

    described = {"placement": threads.warning()} | machine.describe(dtypes)
    peak_of = dtypes[0] if suite.has_peak and len(dtypes) == 1 else None  # each dtype has its own
    results = []
    steps = 2 + (1 + len(suite.directions)) * len(entries) * len(dtypes)
    with tqdm(total=steps, bar_format="{desc:<28}{bar} {elapsed}") as bar:

        def step(text, function, *args):
            bar.set_description_str(text)
            result = function(*args)
            bar.update()
            return result

        before = step("this machine", machine.rates, peak_of)
        for entry, dtype in itertools.product(entries, dtypes):
            case = suite.case(entry, dtype)
            label = entry.name if len(dtypes) == 1 else f"{entry.name} {machine.name_of(dtype)}"
            result = entry.described(dtype) | {"dtype": machine.name_of(dtype)}
            result["check"] = step(f"{label} check", check, case)
            read_gbs = machine.rates(None)["read_gbs"] if entry.reads_memory else None
            for d in suite.directions:
                result[d] = step(f"{label} {d}", time, case, d, seconds, repeats, d in remembered)
            if read_gbs:
                result["read_gbs"] = max(read_gbs, machine.rates(None)["read_gbs"])
            results.append(result)
            del case  # before there is another one
        after = step("this machine again", machine.rates, peak_of)
    peak = report.best(before, after)
    return report.summarize(suite.name, described, peak, suite.directions, results)


def time(case, direction, seconds, repeats, has_memory):
    """All calls of Case.timed(), in turn: the report.figures() of them."""
    calls, how = case.timed(direction)
    found = measure(calls, seconds, repeats)
    calls.clear()  # with what their forward passes keep
    memory = extra_bytes(case, direction, how["way"]) if has_memory else {}
    return report.figures(case.entry, case.dtype, direction, found, how, memory)
