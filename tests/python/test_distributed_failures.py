"""What becomes of the other ranks when one dies, waits elsewhere or calls something else: an error
that names the cause, within the group's timeout; never a hang, never a wrong number."""

import contextlib
import functools
import itertools
import math
import os
import re

import numpy as np
import pytest
import torch
import torch.distributed as dist
from distributed_calls import Whole, assert_same, mesh_of, on_rank, together
from distributed_world import run, run_fresh
from torch.distributed.tensor import distribute_tensor

import qkv
from qkv.distributed import ring_attention, unshard

CAUSAL = Whole(scalars={"is_causal": True}, kv_heads=2)
# In seconds: of a group, and what a test waits for ranks that do not come back.
GROUP_TIMEOUT, HANGS = 3.0, 60.0

# What a rank of three calls of torch.distributed in a ring, in order. At each step it begins to
# receive a tensor for key and one for value, and to send them.
STEPS = [f"{x}, step {step}" for x in ("forward", "backward", "gradients back") for step in (2, 3)]
RING = ["comparing the arguments", *(step for step in STEPS for _ in range(4))]
# One of two, where the heads are divided: query, key and value; output and lse; their gradients.
HEADS = ["comparing the arguments", *["forward"] * 5, *["backward"] * 5]
CALLS = ["irecv", "isend", "all_gather", "all_to_all_single"]


def dies_at_call(number, rank, method):
    """The results of on_rank, but the process of one rank ends at this call."""
    if dist.get_rank() == rank:
        calls = itertools.count()
        for name in CALLS:
            setattr(dist, name, functools.partial(die_at, number, calls, getattr(dist, name)))
    return on_rank(CAUSAL, method)


def die_at(number, calls, function, *args, **more):
    if next(calls) == number:
        os._exit(3)
    return function(*args, **more)


def errors_of(outcomes, dead, expected):
    """What the others raised, all of it ours. One that needed no more of the dead rank when that
    died may be through, with results that are right."""
    errors = []
    for rank, outcome in enumerate(outcomes):
        if rank == dead:
            assert outcome.exitcode == 3
        elif outcome.error is not None:
            assert "RuntimeError: ring_attention: " in outcome.error, outcome.error
            errors.append(outcome.error.rpartition("RuntimeError: ring_attention: ")[2])
        else:
            for name, x in outcome.result.items():
                torch.testing.assert_close(x, expected[rank][name], rtol=1e-12, atol=1e-12)
    return errors


@pytest.mark.one_in(3)
@pytest.mark.parametrize("number", range(len(RING)), ids=lambda n: f"{n}: {RING[n]}")
def test_a_rank_dies_in_a_ring(number):
    outcomes = run_fresh(
        3, dies_at_call, number, 1, "ring", timeout=HANGS, group_timeout=GROUP_TIMEOUT
    )
    errors = errors_of(outcomes, 1, run(3, on_rank, CAUSAL))
    assert errors
    for error in errors:
        assert re.match(
            "comparing the arguments with the other ranks' failed; another rank has ended|"
            "(forward|backward), step [23] of 3: (receiving|sending) (gradients of )?keys and "
            "values (from|to) rank [012] failed; another rank has ended, raised an error",
            error,
        ), error
    # Others may be through with the phase, and notice in the next one.
    phase = "backward" if number > 8 else "forward" if number > 0 else "comparing"
    assert any(error.startswith(phase) for error in errors), errors
    assert number == 0 or any("rank 1 failed" in error for error in errors), errors


@pytest.mark.one_in(2)
@pytest.mark.parametrize("number", range(len(HEADS)), ids=lambda n: f"{n}: {HEADS[n]}")
def test_a_rank_dies_in_an_all_to_all(number):
    outcomes = run_fresh(
        2, dies_at_call, number, 1, "heads", timeout=HANGS, group_timeout=GROUP_TIMEOUT
    )
    (error,) = errors_of(outcomes, 1, None)
    doing = "all-to-all over heads, (rows to heads|heads to rows)" if number else "comparing"
    assert re.match(f"{doing}.* failed; another rank has ended", error), error


def only_forward():
    """One rank does not call backward."""
    local = [torch.randn(1, 2, 4, 8, requires_grad=True) for _ in range(3)]
    output = ring_attention(*local)
    if dist.get_rank() != 1:
        output.sum().backward()


def only_some():
    """One rank does not call at all."""
    if dist.get_rank() != 1:
        ring_attention(*torch.randn(3, 1, 2, 4, 8))


@pytest.mark.parametrize(
    "function, doing",
    [(only_forward, "backward, step 2 of 2"), (only_some, "comparing the arguments")],
)
def test_a_rank_waits_elsewhere(function, doing):
    found = run_fresh(2, function, timeout=HANGS, group_timeout=GROUP_TIMEOUT)
    assert found[1].is_well
    assert f"RuntimeError: ring_attention: {doing}" in found[0].error
    assert "Timed out" in found[0].error


def backward_in_another_order(method):
    """The second rank has the gradients of the second of two calls first."""
    local = [torch.randn(1, 2, 4, 8, requires_grad=True) for _ in range(3)]
    outputs = [ring_attention(*local, method=method) for _ in range(2)]
    for output in outputs if dist.get_rank() == 0 else reversed(outputs):
        output.sum().backward()


@pytest.mark.parametrize(
    "method, message",
    [
        ("ring", "backward, step 2 of 2: receiving keys and values from rank [01] failed"),
        ("heads", "all-to-all over heads, rows to heads failed.*: rank [01] has sent what belongs"),
    ],
)
def test_calls_do_not_take_each_others_messages(method, message):
    """That would be gradients of the wrong numbers, and no error."""
    found = run_fresh(2, backward_in_another_order, method, timeout=HANGS, group_timeout=1.0)
    for outcome in found:
        assert re.search(f"RuntimeError: ring_attention: {message}", outcome.error or "no error")


def unlucky(score, batch, head, query, key):
    raise KeyError("out of luck")


# What rank 1 says instead, and what all ranks are told about it.
UNLIKE = [
    ({"rows": 6}, "query is float32 [2, 4, 4, 8] on rank 0, but float32 [2, 4, 6, 8] on rank 1"),
    ({"batch": 1}, "query is float32 [2, 4, 4, 8] on rank 0, but float32 [1, 4, 4, 8] on rank 1"),
    (
        {"kv_heads": 2, "enable_gqa": True},
        "key is float32 [2, 4, 4, 8] on rank 0, but float32 [2, 2, 4, 8] on rank 1",
    ),
    (
        {"dtype": torch.float64},
        "query is float32 [2, 4, 4, 8] on rank 0, but float64 [2, 4, 4, 8] on rank 1",
    ),
    (
        {"requires_grad": True},
        "query is float32 [2, 4, 4, 8] on rank 0, but float32 [2, 4, 4, 8] that requires grad on "
        "rank 1",
    ),
    ({"is_causal": True}, "is_causal is False on rank 0, but True on rank 1"),
    ({"scale": 0.5}, "scale is None on rank 0, but 0.5 on rank 1"),
    ({"softcap": 5.0}, "softcap is 0.0 on rank 0, but 5.0 on rank 1"),
    ({"window_size": (1, 0)}, "window_size is None on rank 0, but (1, 0) on rank 1"),
    ({"dropout_p": 0.5}, "dropout_p is 0.0 on rank 0, but 0.5 on rank 1"),
    ({"seqlen": 7}, "seqlen is 8 on rank 0, but 7 on rank 1"),
    ({"method": "heads"}, "method is ring on rank 0, but heads on rank 1"),
    ({"sinks": torch.zeros(4)}, "sinks is None on rank 0, but float32 [4] on rank 1"),
    ({"attn_mask": torch.zeros(8)}, "attn_mask is None on rank 0, but float32 [8] on rank 1"),
    (
        {"cu_seqlens": torch.tensor([0, 8]), "batch": None},
        "query is float32 [2, 4, 4, 8] on rank 0, but float32 [4, 4, 8] on rank 1",
    ),
    (
        {"bias": torch.zeros(5, 8)},
        "on rank 1: attention: bias has the shape [5, 8], which does not broadcast",
    ),
    ({"softcap": -1.0}, "on rank 1: attention: softcap is -1, but"),
    ({"query": 3}, "on rank 1: query is 3, but a dense tensor is expected"),
    ({"score_mod": unlucky}, "on rank 1: 'out of luck'"),
    ({"score_mod": 3}, "on rank 1: score_mod is 3, but a function or None is expected"),
    (
        {"dropout_p": 0.5, "dropout_seed": math.inf},
        "on rank 1: dropout_seed is inf, but an int of 64 bits, or a tensor of one, is expected",
    ),
    ({"spans": (0, 8)}, "on rank 1: spans is (0, 8), but qkv.Spans, FlexAttention's BlockMask or"),
    (
        {"spans": torch.tensor([0, 2, 5, 3], dtype=torch.int32).expand(4, 4)},
        "on rank 1: spans has the span from 5 to 3, but 0 <= begin <= end <= 8 is expected",
    ),
]


def attend(
    query=None, batch=2, rows=4, kv_heads=4, dtype=torch.float32, requires_grad=False, **more
):
    lead = () if batch is None else (batch,)
    key, value = torch.randn(2, *lead, kv_heads, rows, 8, dtype=dtype)
    if query is None:
        query = torch.randn(*lead, 4, rows, 8, dtype=dtype, requires_grad=requires_grad)
    return ring_attention(query, key, value, **more)


def message_of(function, *args, **more):
    with pytest.raises(RuntimeError) as error:
        function(*args, **more)
    return str(error.value)


def unlike(unlike_others):
    return message_of(attend, **unlike_others if dist.get_rank() == 1 else {})


@pytest.mark.parametrize("unlike_others, message", UNLIKE, ids=lambda x: str(x)[:30])
def test_ranks_that_call_unlike(unlike_others, message):
    found = run(2, unlike, unlike_others)
    assert found[0] == found[1]
    assert found[0].startswith(f"ring_attention: {message}"), found[0]


def as_reproducible_as_may_be():
    with qkv.reproducible() if dist.get_rank() else contextlib.nullcontext():
        return message_of(attend)


def test_one_rank_asks_for_the_same_bits():
    (found,) = set(run(2, as_reproducible_as_may_be))
    assert found == (
        "ring_attention: reproducible is False on rank 0, but True on rank 1; the same is expected "
        "on all ranks"
    )


def equal_numbers():
    """Each rank says them in its own way."""
    first, second = {"scale": 1, "window_size": (2, 1)}, {"scale": 1.0, "window_size": [2, 1]}
    first |= {"softcap": 4, "is_causal": True, "dropout_p": 0}
    second |= {"softcap": torch.tensor(4.0), "is_causal": 1, "dropout_p": 0.0}
    attend(**(first, second)[dist.get_rank()])


def test_equal_numbers_are_equal():
    run(2, equal_numbers)


def unlike_on_a_mesh():
    return message_of(attend, group=mesh_of((2, 2)), is_causal=dist.get_rank() == 2)


def test_ranks_of_a_mesh_that_call_unlike():
    (found,) = set(run(4, unlike_on_a_mesh))
    assert found == (
        "ring_attention: is_causal is False on rank 0, but True on rank 2; the same is expected on "
        "all ranks"
    )


def dropout_seeds():
    return message_of(attend, dropout_p=0.5, dropout_seed=dist.get_rank())


def documents():
    ends = torch.tensor([0, 3 + dist.get_rank(), 8])
    return message_of(attend, batch=None, cu_seqlens=ends)


def functions():
    if dist.get_rank() == 1:
        return message_of(unshard, torch.zeros(4), 0)
    return message_of(attend)


def of_a_dtensor():
    return message_of(attend, query=distribute_tensor(torch.zeros(2, 4, 4, 8), mesh_of((2,))))


def test_a_dtensor():
    for found in run(2, of_a_dtensor):
        assert found == (
            "ring_attention: query is a DTensor, but what this rank has of it, .to_local(), is "
            "expected"
        )


@pytest.mark.parametrize(
    "function, message",
    {
        dropout_seeds: "dropout_seed is 0 on rank 0, but 1 on rank 1",
        documents: "cu_seqlens is [0, 3, 8] on rank 0, but [0, 4, 8] on rank 1",
        functions: "function is ring_attention on rank 0, but unshard on rank 1",
    }.items(),
)
def test_what_is_unlike(function, message):
    for found in run(2, function):
        assert found.endswith(f": {message}; the same is expected on all ranks")


def alike(arguments):
    return message_of(attend, **arguments)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"rows": 5}, "query has 5 rows, but an even number is expected, as qkv.distributed.shard"),
        ({"seqlen": 9}, "seqlen is 9, but 0 to 8 is expected: 2 shards of 4 rows"),
        ({"seqlen": -1}, "seqlen is -1, but 0 to 8 is expected"),
        ({"seqlen": np.int64(9)}, "seqlen is 9, but 0 to 8 is expected: 2 shards of 4 rows"),
        ({"seqlen": True}, "seqlen is True, but an int is expected"),
        ({"seqlen": 8.0}, "seqlen is 8.0, but an int is expected"),
        ({"seqlen": "8"}, "seqlen is '8', but an int is expected"),
        ({"method": "tree"}, "method is 'tree', but one of ('ring', 'heads', 'auto') is expected"),
        (
            {"query": torch.zeros(2, 4, 6, 8)},
            "key has 4 rows, but 6 are expected, as many as query has: they are shards of one",
        ),
        ({"query": torch.zeros(8)}, "query is [8], but [..., H, L_local, D] is expected"),
        (
            {"query": torch.zeros(2, 4, 4, 8, device="meta")},
            "query is on meta, but a tensor on the CPU",
        ),
        (
            {"cu_seqlens": [0, 8], "batch": None},
            "cu_seqlens is [0, 8], but a tensor of int32 or int64 is expected",
        ),
        (
            {"cu_seqlens": torch.tensor([0.0, 8.0]), "batch": None},
            "cu_seqlens is torch.float32, but a tensor of int32 or int64 is expected",
        ),
        (
            {"cu_seqlens": torch.zeros(2, 2, dtype=torch.int32), "batch": None},
            "cu_seqlens is [2, 2], but [N + 1] is expected",
        ),
        (
            {"cu_seqlens": torch.tensor([0, 5, 4]), "batch": None},
            "cu_seqlens is [0, 5, 4], but numbers from 0 to the length of the sequence, 8, that do",
        ),
        (
            {"cu_seqlens": torch.tensor([0, 9]), "batch": None},
            "cu_seqlens is [0, 9], but numbers from 0 to the length of the sequence, 8, that do",
        ),
        (
            {"cu_seqlens": torch.tensor([0, 8])},
            "query is [2, 4, 4, 8], but [H, L_local, D] or [1, H, L_local, D] is expected with",
        ),
        (
            {"cu_seqlens": torch.tensor([0, 8]), "query": torch.zeros(1, 4, 4, 8)},
            "key is [2, 4, 4, 8], but [H, L_local, D] or [1, H, L_local, D] is expected with",
        ),
        (
            {"cu_seqlens": torch.tensor([0, 8]), "batch": 1, "bias": torch.zeros(2, 4, 4, 8)},
            "attention: bias has the shape [2, 4, 4, 8], which does not broadcast to",
        ),
        (
            {"cu_seqlens": torch.tensor([0, 8]), "batch": None, "sinks": torch.zeros(3, 4)},
            "sinks is [3, 4], but [H] or [1, H] is expected, a row for each document of cu_seqlens",
        ),
        (
            {"cu_seqlens": torch.zeros(2, dtype=torch.int32, device="meta"), "batch": None},
            "cu_seqlens is on meta, but a tensor on the CPU is expected",
        ),
        (
            {"query": 3, "cu_seqlens": torch.tensor([0, 8])},
            "query is 3, but a dense tensor is expected",
        ),
        (
            {"query": torch.zeros(2, 4, 4, 8).to_sparse()},
            "query is a tensor of torch.sparse_coo, but a dense tensor is expected",
        ),
        (
            {"spans": torch.tensor([0, 9], dtype=torch.int32).expand(4, 2)},
            "spans has the span from 0 to 9, but 0 <= begin <= end <= 8 is expected, the length of",
        ),
        ({"dropout_p": 0.5, "dropout_seed": 2.5}, "dropout_seed is 2.5, but an int of 64 bits"),
        ({"dropout_p": 0.5, "dropout_seed": 2**64}, f"dropout_seed is {2**64}, but an int of"),
        ({"dropout_p": 2.0}, "attention: dropout_p is 2, but"),
        ({"kv_heads": 3}, "attention: key "),
    ],
    ids=lambda x: str(x)[:40],
)
def test_bad_arguments(arguments, message):
    for found in run(2, alike, arguments):
        assert found.startswith(f"ring_attention: {message}"), found


def lengths():
    """The last rank's is an int, the others' are numpy's and torch's."""
    torch.manual_seed(dist.get_rank())
    length = [np.int64(7), torch.tensor(7), 7][dist.get_rank()]
    query = torch.randn(2, 4, 4, 8)
    output = ring_attention(query, query, query, seqlen=length)
    assert torch.equal(output, ring_attention(query, query, query, seqlen=7))
    return unshard(output, -2, seqlen=length).shape


def test_a_length_may_be_any_whole_number():
    for shape in run(3, lengths):
        assert shape == (2, 4, 7, 8)


def test_unknown_option():
    with pytest.raises(TypeError, match=r"ring_attention\(\) got an unexpected keyword argument"):
        ring_attention(*torch.zeros(3, 2, 4, 8), colour="red")


def test_without_torch_distributed():
    with pytest.raises(RuntimeError, match="ring_attention: torch.distributed is not initialized"):
        ring_attention(*torch.zeros(3, 2, 4, 8))


def test_after_errors_a_world_goes_on():
    """Arguments that are refused leave nothing on its way."""
    for _ in range(2):
        run(2, unlike, UNLIKE[0][0])
        assert_same(CAUSAL, together(CAUSAL, run(2, on_rank, CAUSAL)))
