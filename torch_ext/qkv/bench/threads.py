"""Whether threads share a CPU: there they take turns, a time slice of the scheduler each, and wait
for each other at every barrier."""

import os
from pathlib import Path

import torch

import qkv

PROBES = 3  # threads that shared a CPU once may have been on their way


def warning() -> str | None:
    """What to say if threads of OpenMP do; None if they do not, or if nobody can tell."""
    threads = torch.get_num_threads()
    if threads == 1 or not all(shared(*probed(threads)) for _ in range(PROBES)):
        return None
    said = f"some of the {threads} threads share a CPU, and wait for each other at every barrier"
    if threads > (cpus := len(allowed())):
        return f"{said}: there are only {cpus}. Take --threads {cpus} or OMP_NUM_THREADS={cpus}"
    slices = "medians come in multiples of 4 or 8 ms, torch's likewise"
    return f"{said}: {slices}. Run it with OMP_PROC_BIND=true"


def allowed() -> set[int]:
    """The CPUs of all threads together: each that is bound has one of its own."""
    return set().union(*(os.sched_getaffinity(int(i)) for i in stats()))


def probed(threads: int) -> tuple[dict, dict]:
    """The stats() before and after they all worked for a while."""
    before = stats()
    torch.ops.qkv._probe_peak(qkv.active_isa(), torch.float32, threads)
    return before, stats()


def stats() -> dict[str, tuple[int, str]]:
    """{thread: what parsed() says of it}"""
    tasks = Path("/proc/self/task").glob("*/stat")
    try:
        return {task.parent.name: parsed(task.read_text()) for task in tasks}
    except OSError:  # a thread ended meanwhile
        return {}


def parsed(stat: str) -> tuple[int, str]:
    """(CPU time in ticks, the CPU it was last on), of the text that proc(5) describes."""
    fields = stat.rpartition(")")[2].split()  # behind the name, which may have spaces
    return int(fields[11]) + int(fields[12]), fields[36]


def shared(before: dict[str, tuple[int, str]], after: dict[str, tuple[int, str]]) -> bool:
    """Whether two of the threads that worked in between were on one CPU last."""
    worked = {i: taken - before.get(i, (0,))[0] for i, (taken, _) in after.items()}
    cpus = [after[i][1] for i, taken in worked.items() if 0 < max(worked.values()) <= 2 * taken]
    return len({*cpus}) < len(cpus)
