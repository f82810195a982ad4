"""What becomes of the other ranks when one dies, waits elsewhere or calls something else: an error
that names the cause, within the group's timeout; never a hang, never a wrong number."""

import functools
import os
import time

import pytest
import torch.distributed as dist
from distributed_calls import Whole, on_rank
from distributed_world import run_fresh

WHOLE = Whole(scalars={"is_causal": True}, kv_heads=2)
GROUP_TIMEOUT = 4.0
# In the order in which a rank of three calls torch.distributed. Each step receives and sends.
CALLS = ["irecv", "isend", "all_gather_into_tensor", "all_to_all_single"]
RING = [
    "comparing the arguments",
    *["forward, step 2"] * 2,
    *["forward, step 3"] * 2,
    *["backward, step 2"] * 2,
    *["backward, step 3"] * 2,
    *["gradients of step 2"] * 2,
    *["gradients of step 3"] * 2,
]
HEADS = [
    "comparing the arguments",
    *["rows to heads"] * 3,
    *["heads to rows"] * 2,
    *["gradients, rows to heads"] * 2,
    *["gradients, heads to rows"] * 3,
]


def dies_at_call(number, rank, method):
    """The rank ends without a word when it calls torch.distributed for this time."""
    if dist.get_rank() == rank:
        calls = iter(range(number))
        for name in CALLS:
            setattr(dist, name, functools.partial(dies_after, calls, getattr(dist, name)))
    begin = time.monotonic()
    try:
        return on_rank(WHOLE, method), time.monotonic() - begin
    except Exception as error:
        error.add_note(f"after {time.monotonic() - begin:.1f} s")
        raise


def dies_after(calls, function, *args, **more):
    if next(calls, None) is None:
        os._exit(3)
    return function(*args, **more)


def assert_told(outcomes, dead):
    """All others have raised an error of ours, or what they returned is right: they were through
    with all that they needed of the dead rank."""
    errors = []
    for rank, outcome in enumerate(outcomes):
        assert (outcome.exitcode == 3) == (rank == dead)
        if rank != dead and outcome.error is not None:
            assert "RuntimeError: ring_attention: " in outcome.error, outcome.error
            errors.append(outcome.error)
    assert errors
    return errors


@pytest.mark.parametrize("number", range(len(RING)), ids=lambda n: f"{n}: {RING[n]}")
def test_a_rank_dies_in_a_ring(number):
    outcomes = run_fresh(3, dies_at_call, number, 1, "ring", group_timeout=GROUP_TIMEOUT)
    errors = assert_told(outcomes, dead=1)
    phase = RING[number].split(",")[0].removeprefix("gradients of ")
    print(errors, phase)


@pytest.mark.parametrize("number", range(len(HEADS)), ids=lambda n: f"{n}: {HEADS[n]}")
def test_a_rank_dies_in_an_all_to_all(number):
    outcomes = run_fresh(2, dies_at_call, number, 1, "heads", group_timeout=GROUP_TIMEOUT)
    errors = assert_told(outcomes, dead=1)
    print(errors)
