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

import sys
from pathlib import Path

import driver

HERE = Path(__file__).resolve().parent
sys.path += [str(HERE), str(HERE.parent / "python")]


def work(options):
    import hunt
    import torch
    from operators import OPERATORS

    import qkv

    (isa,) = options.isa
    qkv.set_isa(isa)
    torch.set_num_threads(2)
    operators = options.operator or list(OPERATORS)
    hunts = {name: hunt.Hunt(name, options.record) for name in operators}
    for seed, name, calls in driver.rounds(options, operators):
        options.record.begin_round(FUZZER.command_of(seed, calls, isa, name))
        hunts[name].round(seed, calls)
    for name, hunted in hunts.items():
        counts = ", ".join(f"{n} {what}" for what, n in hunted.counts.items())
        print(f"    {name}: {counts}")
    enough = sum(sum(h.counts.values()) for h in hunts.values()) >= 500 * len(hunts)
    lazy = [n for n, h in hunts.items() if not h.counts["held"] or not h.counts["refused"]]
    if enough and lazy:
        sys.exit(f"nothing was held, or nothing refused, of {', '.join(lazy)}")


FUZZER = driver.Fuzzer(HERE, work)

if __name__ == "__main__":
    sys.exit(FUZZER.run(__doc__.split("\n\n")[0]))
