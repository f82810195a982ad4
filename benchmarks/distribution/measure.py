"""What one step of a ring takes on two ranks of this machine, with a core each: computing alone,
transport alone, and both at once, by the same calls as ring_attention makes."""

import json
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from .figures import Layer
from .step import BackwardStep, ForwardStep, Whole

# Transport and computing take about as long with so many heads, so that neither is lost in the
# other's noise; with all of a model's heads, computing is a second long, and transport a hundredth.
HEADS = 4
LENGTHS = (128, 256, 512, 1024, 2048)  # tokens a rank
REPEATS = 15


def measure(
    head_dim: int,
    dtype: torch.dtype,
    lengths: Sequence[int] = LENGTHS,
    repeats: int = REPEATS,
) -> dict:
    """{"layer_measured", "samples", "whole"}: what was attended to; of each pass and length, the
    seconds of a step ("pass", "rows", "bytes", "compute", "own" of the first step, "transport",
    "both"); and of ring_attention, forward and backward ("method", "ranks", "tokens", "seconds").

    Raises:
        torch.multiprocessing.ProcessRaisedException, ProcessExitedException: a rank failed.
    """
    with tempfile.TemporaryDirectory() as folder, limited_threads():
        spawn(run, (folder, head_dim, dtype, lengths, repeats), nprocs=2)
        ranks = [json.loads(Path(folder, f"{n}.json").read_text()) for n in range(2)]
    layer = Layer(HEADS, HEADS, head_dim, dtype.itemsize)
    found = {
        name: [slower(*pair) for pair in zip(*(rank[name] for rank in ranks), strict=True)]
        for name in ranks[0]
    }
    return {"layer_measured": layer.__dict__, **found}


class limited_threads:
    """The processes that are started inside have one thread each, and use loopback alone."""

    WANTED = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}

    def __enter__(self) -> None:
        self._before = {name: os.environ.get(name) for name in self.WANTED}
        os.environ.update(self.WANTED)

    def __exit__(self, *error) -> None:
        for name, value in self._before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def slower(one: dict, other: dict) -> dict:
    """What both ranks measured, as one: neither goes on before the other has done a step, so of
    each repeat the slower counts; of the repeats, the median."""
    pairs = {name: (one[name], other[name]) for name in one}
    return {
        name: median(map(max, zip(*values, strict=True))) if type(values[0]) is list else values[0]
        for name, values in pairs.items()
    }


def run(
    rank: int, folder: str, head_dim: int, dtype: torch.dtype, lengths: Sequence[int], repeats: int
) -> None:
    """What a rank does. Its figures are lists of all repeats, in folder/<rank>.json."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})  # before torch and gloo start their threads
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=2)
    found: dict[str, list[dict]] = {"samples": [], "whole": []}
    for rows in lengths:
        for kind in (ForwardStep, BackwardStep):
            step = kind(rows, HEADS, head_dim, dtype)
            calls = {"compute": step.compute, "own": step.compute_own}
            calls |= {"transport": step.transport, "both": step.both}
            found["samples"].append(step.facts | seconds(calls, repeats))
    alone: Any = [dist.new_group([n]) for n in range(2)][rank]
    for rows in lengths:
        for call in (
            Whole("ring", alone, rows, HEADS, head_dim, dtype),
            Whole("ring", None, rows, HEADS, head_dim, dtype),
            Whole("heads", None, rows, HEADS, head_dim, dtype),
        ):
            found["whole"].append(call.facts | seconds({"seconds": call}, repeats))
    Path(folder, f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def seconds(calls: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, list[float]]:
    """Of each call, so many times, in turn and after a round that does not count. Both ranks begin
    together."""
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for repeat in range(1 + repeats):
        for name, call in calls.items():
            dist.barrier()
            start = time.perf_counter()
            call()
            if repeat:
                taken[name].append(time.perf_counter() - start)
    return taken
