"""Rounds: each has new processes, one of each build, since where a process has its memory makes a
difference of its own. Within a round they take turns, call by call."""

import contextlib
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TURNS = ("then", "now", "now", "then"), ("now", "then", "then", "now")  # drifts hit both alike


class Failed(Exception):
    """Why there is nothing to compare: a wrong answer, a call that a build has not."""


class Process:
    """name: of the build, for errors; package: the folder that holds its Python package."""

    def __init__(self, name, package, environment):
        self.name = name
        env = {k: v for k, v in os.environ.items() if k != "QKV_LIBRARY"} | environment
        env["PYTHONPATH"] = os.pathsep.join([str(package), env.get("PYTHONPATH", "")])
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.ab.worker"], cwd=ROOT, text=True,
            env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip

    def ask(self, *request):
        """A method of Worker and its arguments; returns its result. Raises Failed."""
        self.send(*request)
        return self.reply()

    def send(self, *request):
        with contextlib.suppress(BrokenPipeError):  # reply() says that it has ended
            print(json.dumps(request), file=self._process.stdin, flush=True)

    def reply(self):
        line = self._process.stdout.readline() if self._process.stdout else ""
        if not line:
            raise Failed(f"{self.name}: its process ended with status {self._process.wait()}")
        reply = json.loads(line)
        if "error" in reply:
            raise Failed(f"{self.name}: {reply['error']}")
        return reply["result"]

    def end(self):
        self._process.kill()
        self._process.communicate()


@contextlib.contextmanager
def processes(packages, environment):
    """{name: Process} for {name: package}"""
    with contextlib.ExitStack() as stack:
        found = {}
        for name, package in packages.items():
            found[name] = Process(name, package, environment)
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
