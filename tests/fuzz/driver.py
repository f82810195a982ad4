"""What fuzzers share: a process for each instruction set, which makes calls in rounds, each from a
seed of its own, and a process that forks the others, once it has imported torch, and outlives them.
It does not load qkv itself: in a child of a process that has, attention has one thread.

What fails, crashes or hangs is reported with the call and with the command that makes its round
again. A fuzzer gives `Fuzzer` its folder, and what a process does (`work`).
"""

import argparse
import copy
import dataclasses
import multiprocessing
import os
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROUND = 100  # the most calls of a round, few enough to make a round again in seconds
# The calls of a round where time is given, few enough that each operator has its rounds: a commit's
# gate has half a minute on each instruction set, which is some 200 calls of tests/truth.
TIMED_ROUND = 5


@dataclasses.dataclass
class Fuzzer:
    """folder: with its __main__.py. work: what a process does. It takes the options, with one
    instruction set, and with the process's record (`Record`) as options.record."""

    folder: Path
    work: Callable

    @property
    def name(self):
        return f"tests/{self.folder.name}"

    def arguments(self, text, more=()):
        """Parses the command line. more: flags besides those that all fuzzers have."""
        parser = argparse.ArgumentParser(prog=f"python {self.name}", description=text)
        add = parser.add_argument
        add("--calls", type=int, default=2000, help="on each instruction set (%(default)s)")
        add("--minutes", type=float, help="on each instruction set, instead of --calls")
        add("--seed", type=int, help="the first round's; a new one each time if not given")
        add("--isa", action="append", help="this one only; may be repeated")
        add("--operator", action="append", help="this one only; may be repeated")
        for flag, text in more:
            add(flag, action="store_true", help=text)
        return parser.parse_args()

    def command_of(self, seed, calls, isa, operator):
        what = f"--seed {seed} --calls {calls} --isa {isa}"
        return f'python {self.name} {what} --operator "{operator}"'

    # --- the process that starts the others ---

    def run(self, text, more=()):
        """The program: the exit status."""
        # Before torch is imported: the processes share cores, on which none is to spin.
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")
        options = self.arguments(text, more)
        import torch  # noqa: F401  for the forks; it starts no threads, which a fork would not have

        if options.seed is None:
            options.seed = random.SystemRandom().randrange(2**31)
        isas = options.isa or supported_isas()
        print(f"seed {options.seed}", flush=True)
        folder = self.folder.parents[1] / "build" / self.folder.name
        folder.mkdir(parents=True, exist_ok=True)
        good, waiting, running = True, list(isas), []
        while waiting or running:
            while waiting and len(running) < max(1, os.cpu_count() or 1):
                isa = waiting.pop(0)
                record = folder / f"{isa}.{os.getpid()}"
                # Every instruction set gets other calls: no two of them share a round.
                seed = options.seed + 1_000_000 * isas.index(isa)
                running.append((isa, *self.start(options, isa, seed, record), record))
            isa, process, output, record = running.pop(0)
            good &= report(isa, process, output, record)
            record.unlink(missing_ok=True)
        return 0 if good else 1

    def start(self, options, isa, seed, record):
        """The process, and a file of what it prints."""
        options = copy.copy(options)
        options.isa, options.seed = [isa], seed
        reading, writing = os.pipe()
        process = multiprocessing.get_context("fork").Process(
            target=self.begin, args=(options, record, writing)
        )
        process.start()
        os.close(writing)
        return process, open(reading)

    def begin(self, options, record, writing):
        for printed_to in (1, 2):
            os.dup2(writing, printed_to)
        options.record = Record(record)
        status = self.work(options)
        options.record.done()
        sys.exit(status)


def supported_isas():
    """Those of this CPU, by a child, since this process does not load qkv."""

    def ask(pipe):
        import qkv

        pipe.send(qkv.supported_isas())

    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    child = context.Process(target=ask, args=(theirs,))
    child.start()
    theirs.close()
    try:
        return ours.recv()
    finally:
        child.join()


# --- the process that makes the calls -----------------------------------------------------------


class Record:
    """What a process is doing, in a file, for whoever outlives the process."""

    def __init__(self, path):
        self.file = open(path, "wb", buffering=0)
        self.head = b""

    def begin_round(self, command):
        self.head = command.encode() + b"\n"

    def __call__(self, text):
        data = self.head + text.encode() + b"\n"
        os.pwrite(self.file.fileno(), data, 0)
        os.ftruncate(self.file.fileno(), len(data))

    def done(self):
        os.ftruncate(self.file.fileno(), 0)


def rounds(options, operators):
    """Yields (seed, operator, calls) until there are enough calls, or the time is over. Which
    operator is first, the seed says: what little time leaves out is another one each time."""
    end = time.monotonic() + 60 * options.minutes if options.minutes else None
    left, n = options.calls, 0
    size = TIMED_ROUND if end else max(1, min(ROUND, left // len(operators)))
    while time.monotonic() < end if end else left > 0:
        calls = size if end else min(size, left)
        operator = operators[(options.seed + n) % len(operators)]
        yield options.seed + n // len(operators), operator, calls
        left, n = left - calls, n + 1


def report(isa, process, output, record):
    """Prints how the process ended. Returns True if it ended well."""
    with output:
        printed = output.read()
    process.join()
    print(f"{isa}: {'done' if process.exitcode == 0 else 'FAILED'}\n{printed}", end="", flush=True)
    if process.exitcode == 0:
        return True
    if process.exitcode < 0:
        print(f"  killed by signal {-process.exitcode}")
    if record.exists() and (text := record.read_text()):
        again, _, call = text.partition("\n")
        print(f"  the last call: {call}\n  once more: {again}", flush=True)
    return False
