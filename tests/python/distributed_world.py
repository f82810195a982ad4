"""Runs a function on every rank of a world of processes: gloo, on this machine.

    from distributed_world import run

    def halves(length):                    # at the top level of a test module
        return torch.arange(length).chunk(dist.get_world_size())[dist.get_rank()]

    def test_halves():
        first, second = run(2, halves, 10) # what rank 0 returned, what rank 1 returned

The processes of a world are kept, with their process group, and run the next function that asks for
as many ranks: so a call costs milliseconds, and a test may make hundreds. If a rank raises, `run`
raises WorkerError with that rank's traceback, and the next call gets a new world.

`run_fresh` is for tests in which a rank dies: its world is new and ends with the call, and it
returns what became of each rank.

    def dies(rank):
        if dist.get_rank() == rank:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.barrier()

    def test_dies():
        killed, other = run_fresh(2, dies, 0)
        assert killed.exitcode == -signal.SIGKILL and "closed" in other.error

In a function, the default process group is there, torch computes on one thread, and
torch.manual_seed(0) has been called. Arguments and results are pickled. A collective that waits
longer than `GROUP_TIMEOUT` raises, and so does `run` for a function that takes longer than its
`timeout`.
"""

import atexit
import multiprocessing
import multiprocessing.connection
import os
import pickle
import tempfile
import traceback
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple
from unittest import mock

GROUP_TIMEOUT = 60.0
# How long the others may take to finish or to fail after one rank has raised.
GRACE = 2.0
# The processes are forked from one that has imported these and started no threads: 20 ms each,
# where importing torch takes seconds.
_PRELOADED = [
    "torch.distributed.tensor.parallel", "torch.distributed.fsdp", "torch._dynamo", "pytest", "qkv",
    "qkv.distributed",
]  # fmt: skip


class WorkerError(AssertionError):
    """A rank has raised, or did not come back."""


class Outcome(NamedTuple):
    """What became of a rank: one of the three is set, unless the function returned None."""

    result: object = None
    error: str | None = None  # the traceback, if the function raised or took too long
    exitcode: int | None = None  # if the process ended; minus the signal's number

    @property
    def is_well(self):
        return self.error is None and self.exitcode is None


def _serve(rank, world_size, store, connection, group_timeout):
    """A worker's life: calls, one after the other, until the other end of the pipe is closed."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # a machine's name need not resolve
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, world_size),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=group_timeout),
    )
    while True:
        try:
            call = connection.recv_bytes()
        except EOFError:
            os._exit(0)  # without the destructors of a group in which others may be missing
        try:
            function, args = pickle.loads(call)
            torch.manual_seed(0)
            outcome = Outcome(result=function(*args))
            answer = pickle.dumps(outcome)
        except BaseException:
            answer = pickle.dumps(Outcome(error=traceback.format_exc()))
        connection.send_bytes(answer)


class _World:
    def __init__(self, world_size, group_timeout):
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(_PRELOADED)
        self.folder = tempfile.TemporaryDirectory()
        self.processes, self.connections = [], []
        store = str(Path(self.folder.name) / "store")
        with mock.patch.dict(os.environ, OMP_NUM_THREADS="1"):
            for rank in range(world_size):
                own, workers = context.Pipe()
                process = context.Process(
                    target=_serve,
                    args=(rank, world_size, store, workers, group_timeout),
                    daemon=True,
                )
                process.start()
                workers.close()
                self.processes.append(process)
                self.connections.append(own)

    def outcomes(self, function, args, timeout, grace):
        """By rank, in the order in which they came. Once a rank has raised or died, the others have
        `grace` seconds for each that comes."""
        call = pickle.dumps((function, args))
        for connection in self.connections:
            try:
                connection.send_bytes(call)
            except OSError:
                pass  # The process has died, as its sentinel will say.
        outcomes = {}
        while waiting := [r for r in range(len(self.processes)) if r not in outcomes]:
            ends = {self.connections[r]: r for r in waiting}
            ends |= {self.processes[r].sentinel: r for r in waiting}
            ready = multiprocessing.connection.wait(list(ends), timeout)
            if not ready:
                late = Outcome(error=f"did not come back within {timeout} s")
                return outcomes | dict.fromkeys(waiting, late)
            outcomes |= {r: self._outcome(r) for r in {ends[end] for end in ready}}
            if not all(outcome.is_well for outcome in outcomes.values()):
                timeout = min(timeout, grace)
        return outcomes

    def _outcome(self, rank):
        try:
            return pickle.loads(self.connections[rank].recv_bytes())
        except (EOFError, OSError):
            self.processes[rank].join()
            return Outcome(exitcode=self.processes[rank].exitcode)

    def close(self):
        for connection in self.connections:
            connection.close()
        for process in self.processes:
            process.kill()
            process.join()
        self.folder.cleanup()


_worlds = {}


def run(world_size, function, *args, timeout=120.0):
    """What function(*args) returned on each rank, as a list.

    Raises:
        WorkerError: with the tracebacks of the ranks that raised, died or took longer than
            `timeout` seconds: first the one that was the first.
    """
    if world_size not in _worlds:
        _worlds[world_size] = _World(world_size, GROUP_TIMEOUT)
    outcomes = _worlds[world_size].outcomes(function, args, timeout, GRACE)
    if all(outcome.is_well for outcome in outcomes.values()):
        return [outcomes[rank].result for rank in range(world_size)]
    _worlds.pop(world_size).close()
    raise WorkerError(
        "\n".join(
            f"rank {rank} of {world_size}: {outcome.error or f'exit code {outcome.exitcode}'}"
            for rank, outcome in outcomes.items()
            if not outcome.is_well
        )
    )


def run_fresh(world_size, function, *args, timeout=120.0, group_timeout=GROUP_TIMEOUT):
    """What became of function(*args) on each rank of a new world, as a list of `Outcome`.

    `group_timeout`: how long a collective waits, in seconds. A rank that neither returns nor raises
    nor dies within `timeout` seconds has an error that says so.
    """
    world = _World(world_size, group_timeout)
    try:
        outcomes = world.outcomes(function, args, timeout, grace=timeout)
        return [outcomes[rank] for rank in range(world_size)]
    finally:
        world.close()


@atexit.register
def close():
    """Ends all worlds."""
    while _worlds:
        _worlds.popitem()[1].close()
