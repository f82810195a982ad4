"""What the multi-process tests run on: a rank that fails is heard of, and nothing hangs."""

import os
import re
import signal

import pytest
import torch
import torch.distributed as dist
from distributed_world import WorkerError, run, run_fresh


def sum_of_ranks(start):
    total = torch.tensor(start + dist.get_rank())
    dist.all_reduce(total)
    return total


def process_id():
    return os.getpid()


def raises_on(rank):
    if dist.get_rank() == rank:
        raise ValueError(f"rank {rank} is out of luck")
    dist.barrier()


def dies_on(rank):
    dist.barrier()  # else a slow machine's other ranks fail earlier, where they join the group
    if dist.get_rank() == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_results_of_all_ranks(world_size):
    total = world_size * 10 + sum(range(world_size))
    assert run(world_size, sum_of_ranks, 10) == [torch.tensor(total)] * world_size


def test_a_world_is_kept_until_a_rank_raises():
    before = run(2, process_id)
    assert run(2, process_id) == before
    with pytest.raises(WorkerError, match="(?s)^rank 1 of 2: .*rank 1 is out of luck"):
        run(2, raises_on, 1)
    assert not set(run(2, process_id)) & set(before)


def test_what_became_of_a_rank_that_was_killed():
    outcomes = run_fresh(3, dies_on, 1)
    assert outcomes[1].exitcode == -signal.SIGKILL
    assert all("RuntimeError" in outcomes[rank].error for rank in (0, 2))


def test_a_rank_that_waits_in_vain():
    waits, other = run_fresh(2, raises_on, 1, group_timeout=1)
    assert "out of luck" in other.error
    assert re.search("RuntimeError.*[Tt]imed? ?out", waits.error)
