"""Holds every operator, with random arguments, against the formula in float64: each result and
each gradient, of the first order and the second, by its own size, and the same bits on 1, 3 and 7
threads.

    python tests/truth                                       2000 calls on each instruction set
    python tests/truth --calls 100000 --seed 7 --isa avx2 --operator varlen_attn
    python tests/truth --minutes 2
    python tests/truth --reproducible --isa avx2             and the same bits on all others

tests/fuzz has right and wrong calls, and loose bounds; here all calls are right ones, and bounds
are tight. What fails is printed as a program that stands alone, with as few options as fail.
"""

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path += [str(HERE), str(HERE.parent / "fuzz")]

import driver  # noqa: E402

FLAGS = [
    ("--rounded-lse", "take for right what a float32 lse of large scores makes inaccurate"),
    ("--reproducible", "ask for the same bits on every instruction set, and hold them"),
    ("--wide", "allow four times the error: for a gate whose seeds nobody has drawn before"),
]
ENOUGH = 20  # calls of an operator, of which one at least is to be held


def work(options):
    import judge
    from catalogue import OPERATORS
    from pool import unfair
    from worker import Worker

    import qkv

    (isa,) = options.isa
    if options.wide:
        judge.TIMES, judge.ROUNDINGS = 4 * judge.TIMES, 4 * judge.ROUNDINGS
        judge.NOTHING = 1e-20  # the products behind a smaller number may have been subnormal
    qkv.set_isa(isa)
    qkv.set_reproducible(options.reproducible)
    # What is merged has no bits that are the same everywhere: qkv.merge says so.
    skipped = {"merge"} if options.reproducible else set()
    operators = options.operator or [name for name in OPERATORS if name not in skipped]
    workers = {n: Worker(n, OPERATORS[n], isa, options.record, options) for n in operators}
    for seed, name, calls in driver.rounds(options, operators):
        again = FUZZER.command_of(seed, calls, isa, name)
        options.record.begin_round(again)
        before = workers[name].counts["failed"]
        workers[name].round(seed, calls)
        if workers[name].counts["failed"] > before:
            print(f"  once more: {again}", flush=True)
    total = dict.fromkeys(("held", "failed", "refused"), 0)
    for name, worker in workers.items():
        print(f"    {name}: {counted(worker.counts)}")
        total = {what: n + worker.counts[what] for what, n in total.items()}
    drawn = {name: sum(worker.counts.values()) for name, worker in workers.items()}
    lazy = [n for n, w in workers.items() if drawn[n] >= ENOUGH and not w.counts["held"]]
    if lazy:
        print(f"    nothing was held of {', '.join(lazy)}")
    worse = unfair(workers)
    for line in worse:
        print(f"    {line}")
    calls = sum(total.values())
    print(f"{isa}: {counted(total)} of {calls} calls")
    refused = total["refused"] > calls / (2 if options.reproducible else 20)
    return int(bool(total["failed"] or lazy or worse or refused))


def counted(counts):
    return ", ".join(f"{n} {what}" for what, n in counts.items())


FUZZER = driver.Fuzzer(HERE, work)

if __name__ == "__main__":
    sys.exit(FUZZER.run(__doc__.split("\n\n")[0], FLAGS))
