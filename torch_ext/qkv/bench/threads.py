"""Whether a team of threads has the CPUs that it counts on: two threads on one take turns, each for
the time slice of the scheduler, and wait for each other at every barrier."""

import os
from pathlib import Path

import torch

import qkv

TASKS = Path("/proc/self/task")
PROBES = 3  # threads that shared a CPU once may have been on their way


def warning() -> str | None:
    """What to say if the team shares CPUs; None if it does not, or if nobody can tell."""
    threads = torch.get_num_threads()
    if threads == 1 or not all(shared(*probed(threads)) for _ in range(PROBES)):
        return None
    said = f"some of the {threads} threads share a CPU, and wait for each other at every barrier"
    if threads > (cpus := len(allowed())):
        return f"{said}: there are only {cpus}. Take --threads {cpus} or OMP_NUM_THREADS={cpus}"
    return (
        f"{said}: medians come in multiples of 4 or 8 ms, torch's likewise. "
        "Run it with OMP_PROC_BIND=true"
    )


def allowed() -> set[int]:
    """The CPUs of all threads together: each that is bound has one of its own."""
    return set().union(*(os.sched_getaffinity(int(i)) for i in stats()))


def probed(threads: int) -> tuple[dict[str, str], dict[str, str]]:
    """The stat of each thread, {its id: text}, before and after the team worked for a while."""
    before = stats()
    torch.ops.qkv._probe_peak(qkv.active_isa(), torch.float32, threads)
    return before, stats()


def stats() -> dict[str, str]:
    try:
        return {task.name: (task / "stat").read_text() for task in TASKS.iterdir()}
    except OSError:  # no /proc, or a thread that ended meanwhile
        return {}


def shared(before: dict[str, str], after: dict[str, str]) -> bool:
    """Whether two of the threads that worked in between were on one CPU last."""
    worked = {i: ticks(x) - ticks(before.get(i, "")) for i, x in after.items()}
    most = max(worked.values(), default=0)
    cpus = [fields(after[i])[36] for i, taken in worked.items() if 0 < most <= 2 * taken]
    return len({*cpus}) < len(cpus)


def ticks(stat: str) -> int:
    """The CPU time of a thread, by user and system; 0 of one that was not there."""
    return sum(map(int, fields(stat)[11:13])) if stat else 0


def fields(stat: str) -> list[str]:
    """Those behind the name, which may have spaces: proc(5)'s third is the first here."""
    return stat.rpartition(")")[2].split()
