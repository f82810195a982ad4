"""How much memory a call takes at its peak, beyond its inputs. In a process of its own, which holds
nothing that was freed and might be used again."""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch

WARM_UP = 64  # queries and keys of a call that loads the libraries and starts the threads


def extra_bytes(case, direction, way):
    """{"qkv": bytes, and "torch": those of its `way`, if that is not None}: what is taken from when
    there are the inputs alone to the end of a call. For a backward pass that includes what the
    forward pass keeps for it."""
    ways = {"qkv": None} | ({"torch": way} if way else {})
    return {name: in_own_process(case, direction, way) for name, way in ways.items()}


def in_own_process(case, direction, way):
    """way: one of torch's, or None for ours."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, context) as executor:
        try:
            threads = torch.get_num_threads()
            return executor.submit(taken, case, direction, way, threads).result()
        except Exception as error:
            raise RuntimeError(
                f"measuring the memory of {case.entry} {direction} {way or 'qkv'} failed: {error!r}"
            ) from error


def taken(case, direction, way, threads):
    torch.set_num_threads(threads)

    def grown(case):
        call = case.way(way) if way else case.calls["qkv"]
        return growth(lambda: call.timed(direction)())

    grown(case.resized(WARM_UP))
    return grown(case)


def growth(function):
    """By how many bytes the resident memory of this process grows while function() runs."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak restarts from what is resident now
    before = peak()
    function()
    return peak() - before


def peak():
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("VmHWM")).split()[1])
