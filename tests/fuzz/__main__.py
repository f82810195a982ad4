"""Calls every operator with random arguments, right and wrong ones, and holds what comes back
against the f64 reference.

    python tests/fuzz                                       2000 calls on each instruction set
    python tests/fuzz --calls 100000 --seed 7 --isa avx2 --operator attention
    python tests/fuzz --minutes 30

A call either gives what the reference gives, gradients included, or an error that names an
argument. It never crashes, hangs or warns. The calls are drawn in rounds, each from a seed of its
own, in a process for each instruction set: what fails, crashes or hangs is reported with the call
and with the command that makes that round again.
"""

import argparse
import os
import random
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path += [str(HERE), str(HERE.parent / "python")]
ROUND = 100  # the most calls of a round, few enough to make a round again in seconds


def arguments():
    parser = argparse.ArgumentParser(prog="python tests/fuzz", description=__doc__.split("\n\n")[0])
    add = parser.add_argument
    add("--calls", type=int, default=2000, help="on each instruction set (%(default)s)")
    add("--minutes", type=float, help="on each instruction set, instead of --calls")
    add("--seed", type=int, help="the first round's; a new one each time if not given")
    add("--isa", action="append", help="this one only; may be repeated")
    add("--operator", action="append", help="this one only; may be repeated")
    add("--worker", metavar="FILE", help=argparse.SUPPRESS)  # the file for what it is doing
    return parser.parse_args()


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


def command_of(seed, calls, isa, operator):
    return f'python tests/fuzz --seed {seed} --calls {calls} --isa {isa} --operator "{operator}"'


def rounds(options, operators):
    """Yields (seed, operator, calls) until there are enough calls, or the time is over."""
    end = time.monotonic() + 60 * options.minutes if options.minutes else None
    left, n = options.calls, 0
    size = ROUND if end else max(1, min(ROUND, left // len(operators)))
    while time.monotonic() < end if end else left > 0:
        calls = size if end else min(size, left)
        yield options.seed + n // len(operators), operators[n % len(operators)], calls
        left, n = left - calls, n + 1


def work(options):
    import hunt
    import torch
    from operators import OPERATORS

    import qkv

    (isa,) = options.isa
    qkv.set_isa(isa)
    torch.set_num_threads(2)
    operators = options.operator or list(OPERATORS)
    record = Record(options.worker)
    hunts = {name: hunt.Hunt(name, record) for name in operators}
    for seed, name, calls in rounds(options, operators):
        record.begin_round(command_of(seed, calls, isa, name))
        hunts[name].round(seed, calls)
    for name, hunted in hunts.items():
        counts = ", ".join(f"{n} {what}" for what, n in hunted.counts.items())
        print(f"    {name}: {counts}")
    enough = sum(sum(h.counts.values()) for h in hunts.values()) >= 50 * len(hunts)
    lazy = [n for n, h in hunts.items() if not h.counts["held"] or not h.counts["refused"]]
    if enough and lazy:
        sys.exit(f"nothing was held, or nothing refused, of {', '.join(lazy)}")


# --- the process that starts it -----------------------------------------------------------------


def start(options, isa, seed, record):
    command = [sys.executable, str(HERE), "--worker", str(record), "--isa", isa]
    command += ["--seed", str(seed), "--calls", str(options.calls)]
    command += ["--minutes", str(options.minutes)] if options.minutes else []
    for name in options.operator or []:
        command += ["--operator", name]
    environment = {"OMP_WAIT_POLICY": "passive", **os.environ}
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def report(isa, process, record):
    """Prints how the process ended. Returns True if it ended well."""
    output, _ = process.communicate()
    print(f"{isa}: {'done' if process.returncode == 0 else 'FAILED'}\n{output}", end="", flush=True)
    if process.returncode == 0:
        return True
    if process.returncode < 0:
        print(f"  killed by signal {-process.returncode}")
    if record.exists():
        again, _, call = record.read_text().partition("\n")
        print(f"  the last call: {call}\n  once more: {again}", flush=True)
    return False


def main(options):
    import qkv

    if options.seed is None:
        options.seed = random.SystemRandom().randrange(2**31)
    isas = options.isa or qkv.supported_isas()
    print(f"seed {options.seed}", flush=True)
    folder = HERE.parents[1] / "build" / "fuzz"
    folder.mkdir(parents=True, exist_ok=True)
    good, waiting, running = True, list(isas), []
    while waiting or running:
        while waiting and len(running) < max(1, os.cpu_count() or 1):
            isa = waiting.pop(0)
            record = folder / f"{isa}.{os.getpid()}"
            # Every instruction set gets other calls: no two of them share a round.
            seed = options.seed + 1_000_000 * isas.index(isa)
            running.append((isa, start(options, isa, seed, record), record))
        isa, process, record = running.pop(0)
        good &= report(isa, process, record)
        record.unlink(missing_ok=True)
    return 0 if good else 1


if __name__ == "__main__":
    parsed = arguments()
    sys.exit(work(parsed) if parsed.worker else main(parsed))
