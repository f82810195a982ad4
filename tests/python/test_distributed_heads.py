"""ring_attention by all-to-all over heads, and over heads and a ring at once."""

import functools

import pytest
import torch
import torch.distributed as dist
from distributed_calls import Whole, assert_same, leaves_of, mesh_of, on_rank, together
from distributed_world import run
from test_distributed_ring import CAUSAL, DROPOUT, PACKED, SINKS, SLOPES

import qkv
from qkv.distributed import ring_attention, shard
from qkv.distributed._attend import resolved
from qkv.distributed._call import Call
from qkv.distributed._call import check as check_call
from qkv.distributed._ranks import ALONE, Ranks, Team

CASES = [
    Whole(),
    Whole(scalars={**CAUSAL, "softcap": 2.0}, kv_heads=2, head_dims=(8, 5)),
    Whole(scalars={**CAUSAL, **DROPOUT}, kv_heads=1),
    Whole(heads=8, kv_heads=2, scalars={"window_size": (7, 3)}, per_head={"sinks": (8,)}),
    Whole(per_head=SLOPES | SINKS),
    Whole(per_head={"alibi_slopes": (2, 1), "sinks": (2, 4)}, scalars=DROPOUT),
    Whole(masks={"attn_mask": ("N", "N"), "bias": (4, "N", "N")}),
    Whole(masks={"attn_mask": (2, 1, "N", "N")}, is_bool=True, kv_heads=2),
    Whole(masks={"attn_mask": (2, 1, 1, "N"), "bias": (4, 1, "N")}, scalars=DROPOUT),
    Whole(dtype=torch.float32, scalars={**CAUSAL, **DROPOUT}),
    PACKED(gap=2, scalars={**CAUSAL, **DROPOUT}, per_head={"alibi_slopes": (6, 4), "sinks": (4,)}),
    Whole(masks={"spans": (4, "N", 4)}, scalars=CAUSAL),
    Whole(function=True, scalars=CAUSAL, kv_heads=2),
    PACKED(masks={"bias": (4, "N", "N")}),
]


def check(size, whole, method, mesh_shape=None):
    found = together(whole, run(size, on_rank, whole, method, mesh_shape), mesh_shape)
    assert_same(whole, found)


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("whole", CASES, ids=repr)
def test_every_option(size, whole):
    check(size, whole, "heads")


def test_eight_ranks():
    check(8, CASES[3], "heads")


@pytest.mark.parametrize("mesh_shape", [(2, 2), (1, 4), (4, 1)])
@pytest.mark.parametrize("whole", CASES, ids=repr)
def test_a_mesh_does_both(mesh_shape, whole):
    if mesh_shape == (2, 2) or whole in (CASES[1], CASES[5]):
        check(4, whole, "auto", mesh_shape)


@pytest.mark.parametrize("size, whole", [(3, CASES[1]), (2, CASES[1]), (2, CASES[6])], ids=repr)
def test_auto(size, whole):
    check(size, whole, "auto")


@pytest.mark.parametrize(
    "heads, kv_heads, masks, size, by_heads",
    [
        (4, 4, {}, 2, True),
        (4, 2, {}, 4, True),  # two ranks share a head of key and value
        (4, 4, {}, 3, False),
        (6, 2, {}, 3, False),
        (4, 4, {"attn_mask": (1, 1, 1, "N")}, 2, True),
        (4, 4, {"attn_mask": ("N", "N")}, 2, False),
    ],
)
def test_what_auto_takes(heads, kv_heads, masks, size, by_heads):
    whole = Whole(seqlen=24, heads=heads, kv_heads=kv_heads, masks=masks)
    tensors, _ = whole.tensors()
    tensors = {n: shard_of(x, size, n) for n, x in tensors.items()}
    inputs = {name: tensors.pop(name) for name in ("query", "key", "value")}
    options = whole.options()
    call = Call(inputs, None, None, "auto", **tensors, **options)
    team = Team(ALONE, Ranks(None, 0, size))
    check_call(call, team)
    assert (resolved(call, team).heads.size == size) == by_heads


def shard_of(tensor, size, name):
    rows = tensor.size(-2)
    return tensor.narrow(-2, 0, rows // size) if rows > 1 and name != "bias" else tensor


def derivatives(function):
    """Second derivatives and forward mode, of what is computed over heads, by this rank."""
    whole = Whole(seqlen=8, batch=(), heads=2, kv_heads=2, scalars={**CAUSAL, **DROPOUT})
    tensors, _ = whole.tensors()
    local = [shard(x, -2) for x in tensors.values()]
    attend = functools.partial(ring_attention, method="heads", **whole.options())
    return function(attend, local, [shard(x, -2) for x in tensors.values()])


def second_derivatives(attend, local, directions):
    local = [x.requires_grad_() for x in local]
    first = torch.autograd.grad(attend(*local).square().sum(), local, create_graph=True)
    total = sum((x * y).sum() for x, y in zip(first, directions, strict=True))
    return {"grad_query": torch.autograd.grad(total, local[0])[0]}


def forward_mode(attend, local, directions):
    return {"output": torch.func.jvp(attend, tuple(local), tuple(directions))[1]}


@pytest.mark.parametrize("function", [second_derivatives, forward_mode])
def test_every_derivative(function):
    """On two ranks as on one."""
    whole = Whole(seqlen=8)
    (one,), two = run(1, derivatives, function), run(2, derivatives, function)
    assert len(one) == 1
    for name, x in together(whole, two).items():
        torch.testing.assert_close(x, one[name], rtol=1e-12, atol=1e-12)


def of_one_head(method, shapes):
    """Output and gradients on each rank, and what one process has of them."""
    whole, found = [torch.randn(shape, dtype=torch.float64) for shape in shapes], []
    attend = functools.partial(ring_attention, method=method)
    for function, cut in ((qkv.attention, lambda x: x), (attend, lambda x: shard(x, -2))):
        leaves = [cut(x).requires_grad_() for x in whole]
        output = function(*leaves, is_causal=True)
        found.append([output, *torch.autograd.grad(output.sin().sum(), leaves)])
    alone, of_ranks = found
    return [shard(x, -2) for x in alone], of_ranks


@pytest.mark.parametrize("method", ["heads", "auto"])
@pytest.mark.parametrize(
    "size, shapes",
    [
        (1, [(8, 4), (8, 4), (8, 3)]),
        (2, [(8, 4), (4, 8, 4), (4, 8, 3)]),
        (2, [(4, 8, 4), (8, 4), (2, 4, 8, 3)]),
    ],
)
def test_inputs_without_a_dimension_of_heads(size, shapes, method):
    for expected, found in run(size, of_one_head, method, shapes):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def second_derivative_of_masked_documents():
    query, key, value = torch.randn(3, 2, 4, 8, requires_grad=True)
    output = ring_attention(
        query, key, value, torch.ones(8).bool(), cu_seqlens=torch.tensor([0, 8]), method="heads"
    )
    (first,) = torch.autograd.grad(output.sum(), query, create_graph=True)
    with pytest.raises(NotImplementedError, match="second derivative.*packed documents with masks"):
        torch.autograd.grad(first.sum(), key)


def test_masked_documents_have_first_derivatives():
    run(2, second_derivative_of_masked_documents)


def some_derivatives(whole, inputs, with_lse, attend, cut):
    """Of these inputs alone, and of a loss that lse may be in."""
    tensors, grads = whole.tensors()
    leaves = leaves_of({name: cut(x) for name, x in tensors.items()})
    output, lse = attend(*leaves.values(), return_lse=True)
    loss = (output * cut(grads["grad_output"])).sum() + (lse.sum() if with_lse else 0)
    return dict(zip(inputs, torch.autograd.grad(loss, [leaves[n] for n in inputs]), strict=True))


def other_derivatives_on_each_rank():
    """What this rank asks for, and the same by one process that knows all ranks' losses."""
    whole, is_first = Whole(seqlen=16), dist.get_rank() == 0
    inputs = ("query", "key", "value") if is_first else ("value",)
    attend = functools.partial(ring_attention, method="heads")
    found = some_derivatives(whole, inputs, is_first, attend, lambda x: shard(x, -2))

    def alone(*tensors, return_lse):
        output, lse = qkv.attention(*tensors, return_lse=return_lse)
        return output, lse[..., [0, 1, 2, 3, 12, 13, 14, 15]]  # the first rank's rows

    expected = some_derivatives(whole, inputs, True, alone, lambda x: x)
    return found, {name: shard(x, -2) for name, x in expected.items()}


def test_ranks_that_want_other_derivatives():
    """Each takes part in what the other one needs, and gets what it asks for."""
    for found, expected in run(2, other_derivatives_on_each_rank):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def message_of(function):
    with pytest.raises(RuntimeError) as error:
        function()
    return str(error.value)


def refused(method="heads", mesh_shape=None, **more):
    tensors, _ = Whole(**{"heads": 6, "kv_heads": 6, **more}).tensors()
    group = mesh_of(mesh_shape) if mesh_shape else None
    local = {n: shard(x, -2, group) if x.size(-2) > 1 else x for n, x in tensors.items()}
    return message_of(
        lambda: ring_attention(**local, method=method, group=group, seqlen=50, enable_gqa=True)
    )


@pytest.mark.parametrize(
    "more, message",
    [
        ({}, "query has 6 heads, but a multiple of 4 is expected, a part for each rank"),
        (
            {"heads": 12, "kv_heads": 3},
            "key has 3 heads, but a multiple or a divisor of 4 is expected, the number of ranks "
            "that divide the heads",
        ),
        (
            {"mesh_shape": (2, 2)},
            'method is "heads" with a mesh of two dimensions, which cuts heads and rows; "ring" or '
            '"auto" is expected',
        ),
        (
            {"mesh_shape": (4, 1), "method": "ring"},
            "query has 6 heads, but a multiple of 4 is expected, a part for each rank",
        ),
    ],
    ids=str,
)
def test_errors(more, message):
    assert set(run(4, functools.partial(refused, **more))) == {f"ring_attention: {message}"}
