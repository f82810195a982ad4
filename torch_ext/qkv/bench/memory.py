"""How much memory a call takes at its peak, beyond its inputs. In a process of its own, which holds
nothing that was freed and might be used again."""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path

import torch

from .case import Case

WARM_UP = 64  # queries and keys of a call that loads the libraries and starts the threads


def extra_bytes(case, direction, way, parse):
    """{"qkv": bytes, and "torch": those of its `way`, if that is not None}: what is taken from when
    there are the inputs alone to the end of a call. For a backward pass that includes what the
    forward pass keeps for it. parse: of the case's Suite."""
    names = {"qkv": ""} | ({"torch": way} if way else {})
    return {name: in_own_process(case, direction, way, parse) for name, way in names.items()}


def in_own_process(case, direction, way, parse):
    """way: one of torch's, or "" for ours."""
    what = (parse, str(case.entry), case.dtype, direction, way, bool(case.tangents))
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, context) as executor:
        try:
            return executor.submit(taken, *what, torch.get_num_threads()).result()
        except Exception as error:
            raise RuntimeError(
                f"measuring the memory of {case.entry} {direction} {way or 'qkv'} failed: {error!r}"
            ) from error


def taken(parse, spelling, dtype, direction, way, with_tangents, threads):
    torch.set_num_threads(threads)
    entry, found = parse(spelling), 0
    for seqlen in (WARM_UP, None):
        sizes = {"seqlen_q": seqlen, "seqlen_k": seqlen} if seqlen else {}
        measured = replace(entry, shape=replace(entry.shape, **sizes))
        case = Case(measured, dtype, with_tangents=with_tangents)
        call = case.way(way) if way else case.calls["qkv"]
        found = growth(lambda call=call: call.timed(direction)())
    return found


def growth(function):
    """By how many bytes the resident memory of this process grows while function() runs."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak restarts from what is resident now
    before = peak()
    function()
    return peak() - before


def peak():
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("VmHWM")).split()[1])
