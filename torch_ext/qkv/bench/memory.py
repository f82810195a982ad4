"""How much memory a call takes at its peak, beyond its inputs. In a process of its own, which holds
nothing that was freed and might be used again."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import torch

from .case import Case
from .machine import name_of
from .suites import Entry

WARM_UP = 64  # queries and keys of a call that loads the libraries and starts the threads


def extra_bytes(case, direction, way):
    """{"qkv": bytes, and "torch": those of its `way`, if that is not None}: what is taken from when
    there are the inputs alone to the end of a call. For both backward passes that includes what
    the forward pass keeps for them."""
    names = {"qkv": ""} | ({"torch": way} if way else {})
    return {name: in_own_process(case, direction, way) for name, way in names.items()}


def in_own_process(case, direction, way):
    """way: one of torch's, or "" for ours."""
    what = [str(case.entry), name_of(case.dtype), direction, way, str(torch.get_num_threads())]
    command = [sys.executable, "-m", __name__, *what]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"measuring the memory of {' '.join(what)} failed:\n{done.stderr}")
    return int(done.stdout)


def main(spelling, dtype, direction, way, threads):
    torch.set_num_threads(int(threads))
    entry = Entry.parse(spelling)
    for seqlen in (WARM_UP, None):
        sizes = {"seqlen_q": seqlen, "seqlen_k": seqlen} if seqlen else {}
        measured = replace(entry, shape=replace(entry.shape, **sizes))
        case = Case(measured, getattr(torch, dtype), with_tangents=True)
        call = case.ways[way] if way else case.calls["qkv"]
        found = growth(lambda call=call: call.timed(direction)())
    print(found)


def growth(function):
    """By how many bytes the resident memory of this process grows while function() runs."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak restarts from what is resident now
    before = peak()
    function()
    return peak() - before


def peak():
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("VmHWM")).split()[1])


if __name__ == "__main__":
    main(*sys.argv[1:])
