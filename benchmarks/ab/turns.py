"""Rounds: each has new processes, one of each build, since where a process has its memory makes a
difference of its own. Within a round they take turns, call by call."""

import contextlib
import os
import statistics

from ..processes import Process

TURNS = ("then", "now", "now", "then"), ("now", "then", "then", "now")  # drifts hit both alike


@contextlib.contextmanager
def processes(packages, environment):
    """{name: Process} for {name: package}"""
    with contextlib.ExitStack() as stack:
        found = {}
        for name, package in packages.items():
            env = {k: v for k, v in os.environ.items() if k != "QKV_LIBRARY"} | environment
            env["PYTHONPATH"] = os.pathsep.join([str(package), env.get("PYTHONPATH", "")])
            found[name] = Process(name, ["benchmarks.ab.worker"], env)
            stack.callback(found[name].end)
        yield found


def ask_both(pair, *request):
    for process in pair.values():
        process.send(*request)
    return {name: process.reply() for name, process in pair.items()}


def run(packages, entries, args, environment):
    """Returns what machine.describe() says, and {(call, direction): [{"then": seconds, "now":
    seconds} of each round]}. Raises Failed."""
    from tqdm import tqdm  # whose absence the command line names

    machine, found = {}, {}
    for index in tqdm(range(args.rounds), unit="round"):
        with processes(packages, environment) as pair:
            machine = ask_both(pair, "describe", args.dtype, args.threads)["now"]
            for entry in entries:
                for direction, seconds in timed(pair, str(entry), index, args):
                    found.setdefault((str(entry), direction), []).append(seconds)
    return machine, found


def timed(pair, spelling, index, args):
    """[(direction, {"then": seconds, "now": seconds})] of one call in one round. The first round
    checks its answers."""
    directions = ask_both(pair, "prepare", spelling, args.dtype)["now"]
    if index == 0:
        ask_both(pair, "check")
    found = []
    for direction in directions:
        turns = {"then": [], "now": []}
        for name in TURNS[index % 2]:
            turns[name].append(pair[name].ask("time", direction, args.seconds))
        found.append((direction, {n: statistics.geometric_mean(x) for n, x in turns.items()}))
    return found
