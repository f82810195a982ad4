"""ring_attention around a ring against one process: outputs, lse and all gradients."""

import functools
import math
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from distributed_calls import Whole, assert_same, leaves_of, on_rank, results_of, together
from distributed_world import run
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint

import qkv
from qkv.distributed import _passes, ring_attention, shard, unshard
from qkv.distributed._ranks import team_of
from qkv.distributed._transport import receive, send

CAUSAL = {"is_causal": True}
SLOPES, SINKS = {"alibi_slopes": (4,)}, {"sinks": (4,)}
DROPOUT = {"dropout_p": 0.3, "dropout_seed": 0x123456789ABCDEF}
# A shape of each kind that broadcasts to [B, H, L, N].
MASKS = [("N", "N"), (2, 1, "N", "N"), (1, 4, "N", "N"), (2, 1, 1, "N"), (4, 1, "N"), ("N", 1)]

CASES = [
    Whole(),
    Whole(scalars=CAUSAL),
    Whole(scalars={"scale": 0.7, "softcap": 2.0}, head_dims=(8, 5)),
    Whole(scalars=CAUSAL, kv_heads=2),
    Whole(scalars=CAUSAL, kv_heads=1, head_dims=(4, 6)),
    Whole(scalars={"window_size": (5, 0)}),
    Whole(scalars={"window_size": (3, 20)}),
    Whole(scalars={"window_size": (-1, 7)}),
    Whole(scalars={"window_size": (0, 0)}),
    Whole(scalars={"window_size": (100, -1), **CAUSAL}),
    Whole(per_head=SLOPES),
    Whole(per_head={"alibi_slopes": (2, 4)}, scalars=CAUSAL),
    Whole(per_head=SINKS, scalars=CAUSAL),
    Whole(per_head={"sinks": (2, 1)}, scalars={"window_size": (4, 0), **DROPOUT}),
    *(Whole(masks={"attn_mask": shape}) for shape in MASKS),
    Whole(masks={"attn_mask": ("N", "N")}, is_bool=True, per_head=SINKS),
    Whole(masks={"attn_mask": (2, 1, 1, "N"), "bias": (4, "N", "N")}, is_bool=True, scalars=CAUSAL),
    Whole(masks={"bias": (4, "N", "N")}, scalars={"window_size": (9, 2), **DROPOUT}),
    Whole(masks={"spans": (4, "N", 4)}, scalars=CAUSAL, kv_heads=2),
    Whole(masks={"attn_mask": ("N", "N"), "spans": (2, 1, "N", 2)}, scalars=DROPOUT),
    Whole(function=True, scalars=CAUSAL),
    Whole(function=True, masks={"bias": (4, "N", "N")}, per_head=SLOPES | SINKS, kv_heads=2),
    Whole(scalars=DROPOUT),
    Whole(scalars={**CAUSAL, **DROPOUT}, kv_heads=2),
    Whole(batch=(), heads=3, kv_heads=3),
    Whole(batch=(2, 3), heads=2, kv_heads=2, seqlen=21, scalars=CAUSAL),
    Whole(seqlen=1, scalars=CAUSAL),
    Whole(seqlen=5, scalars=CAUSAL, per_head=SINKS),
    Whole(seqlen=48, scalars={**CAUSAL, **DROPOUT, "softcap": 3.0, "window_size": (20, -1)},
          per_head=SLOPES | SINKS, masks={"bias": (1, 4, "N", "N")}, kv_heads=2),
]  # fmt: skip
PACKED = functools.partial(Whole, batch=(), lengths=(3, 0, 11, 20, 1, 7), seqlen=44)
DOCUMENTS = [
    PACKED(gap=2),
    PACKED(scalars=CAUSAL, kv_heads=2),
    PACKED(lengths=(1, 2, 3, 4, 5, 6, 7, 8), scalars={"window_size": (2, 0)}, per_head=SINKS),
    PACKED(gap=1, scalars=CAUSAL | DROPOUT, per_head={"alibi_slopes": (6, 4), "sinks": (6, 4)}),
    PACKED(scalars=DROPOUT, per_head={"alibi_slopes": (4,), "sinks": (1, 4)}),
    PACKED(masks={"bias": (4, "N", "N"), "attn_mask": (1, "N")}, scalars=CAUSAL, per_head=SINKS),
    PACKED(masks={"spans": ("N", 4)}, scalars=CAUSAL),
    PACKED(function=True, gap=2, scalars=CAUSAL),
    PACKED(lengths=(44,), scalars=CAUSAL),
    PACKED(lengths=(), gap=3, per_head=SINKS),
    PACKED(lengths=(0, 0), gap=3),
]  # fmt: skip


def check(size, whole, *args, **more):
    assert_same(whole, together(whole, run(size, functools.partial(on_rank, **more), whole, *args)))


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("whole", CASES + DOCUMENTS, ids=repr)
def test_every_option(size, whole):
    check(size, whole)


@pytest.mark.parametrize("size", [1, 4, 8])
@pytest.mark.parametrize("whole", [CASES[-1], DOCUMENTS[3]], ids=repr)
def test_numbers_of_ranks(size, whole):
    check(size, whole)


def of_a_shard_of_spans():
    torch.manual_seed(0)
    tensors, spans = torch.randn(3, 1, 2, 30, 8), qkv.Spans.window(30, 3, 5)
    own = qkv.Spans(shard(spans.tensor, -2))
    output = ring_attention(*shard(tensors, -2), spans=own, seqlen=30)
    torch.testing.assert_close(
        unshard(output, -2, seqlen=30), qkv.attention(*tensors, spans.to_mask(30))
    )


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_shard_of_spans(size):
    run(size, of_a_shard_of_spans)


def test_a_mesh_of_one_dimension():
    check(2, CASES[1], "ring", (2,))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("size", [2, 4])
def test_rounding(size, dtype):
    for scalars in (CAUSAL, {**DROPOUT, "softcap": 5.0}):
        check(size, Whole(dtype=dtype, scalars=scalars, per_head=SLOPES | SINKS, kv_heads=2))
        check(size, Whole(dtype=dtype, seqlen=300, scalars=scalars))


@pytest.mark.bf16
def test_half_precision_on_eight_ranks():
    check(8, Whole(dtype=torch.bfloat16, seqlen=300, scalars=CAUSAL))


@st.composite
def wholes(draw):
    """Calls of ring_attention with options of every kind."""
    maybe = functools.partial(draw, st.booleans())
    kv_heads = draw(st.sampled_from([1, 2, 4]))
    lengths = None
    if draw(st.integers(0, 2)) == 0:
        lengths = tuple(draw(st.lists(st.integers(0, 25), max_size=8)))
    gap = draw(st.integers(0, 3)) if lengths is not None else 0
    seqlen = gap + sum(lengths or ()) + draw(st.integers(0, 30 if lengths is None else 2))
    side = st.sampled_from([-1, 0, 1, 4, 17, 100])
    scalars = {"is_causal": True} if maybe() else {}
    if maybe():
        scalars["window_size"] = (draw(side), draw(side))
    if maybe():
        scalars |= {"dropout_p": 0.3, "dropout_seed": draw(st.integers(-(2**63), 2**64 - 1))}
    if maybe():
        scalars["softcap"] = 2.0
    batch = () if lengths is not None else draw(st.sampled_from([(), (2,), (1, 2)]))
    rows, items = st.sampled_from(["N", 1]), st.sampled_from([*batch[-1:], 1])
    masks = {}
    for name in ("attn_mask", "bias"):
        if maybe() and maybe():
            masks[name] = (
                *([draw(items)] if batch else []),
                draw(st.sampled_from([1, 4])),
                draw(rows),
                "N",
            )
    per_head = {}
    for name in ("alibi_slopes", "sinks"):
        if maybe() and maybe():
            per_head[name] = (4,) if lengths is None or maybe() else (len(lengths), 4)
    return Whole(
        seqlen=seqlen, batch=batch, kv_heads=kv_heads, head_dims=(4, draw(st.sampled_from([4, 3]))),
        masks=masks, is_bool=maybe(), per_head=per_head, function=maybe() and maybe(),
        lengths=lengths, gap=gap, scalars=scalars,
        seed=draw(st.integers(0, 2**16)),
    )  # fmt: skip


@settings(max_examples=settings().max_examples * 2)
@given(size=st.sampled_from([1, 2, 3, 4]), whole=wholes())
def test_drawn(size, whole):
    check(size, whole)


def varlen(whole):
    """All documents by one call of qkv.varlen_attn."""
    from torch.nn.attention.varlen import AuxRequest

    tensors, grads = whole.tensors()
    inputs = (tensors[name].transpose(0, 1) for name in ("query", "key", "value"))
    torch.manual_seed(3)
    output, lse = qkv.varlen_attn(
        *inputs, whole.ends, None, 44, 44, dropout_p=0.3, window_size=(-1, 0),
        return_aux=AuxRequest(lse=True),
    )  # fmt: skip
    return output.transpose(0, 1), lse


def drawn_dropout(whole, has_batch):
    """With the seed that the first rank's generator draws. has_batch: of a batch of one."""
    torch.manual_seed(3 if dist.get_rank() == 0 else 4)
    tensors, _ = whole.tensors()
    local = [shard(tensors[name], -2) for name in ("query", "key", "value")]
    mask = None
    if has_batch:
        local, mask = [x[None] for x in local], torch.ones(1, 1, 1, whole.seqlen).bool()
    output, lse = ring_attention(
        *local, mask, dropout_p=0.3, is_causal=True, seqlen=whole.seqlen,
        cu_seqlens=whole.ends.int(), return_lse=True,
    )  # fmt: skip
    if has_batch:
        (output,), (lse,) = output, lse
    return unshard(output, -2, seqlen=whole.seqlen), unshard(lse, -1, seqlen=whole.seqlen)


@pytest.mark.parametrize("has_batch", [False, True])
def test_dropout_of_documents_is_varlen_attns(has_batch):
    whole = PACKED(gap=2)
    for results in run(2, drawn_dropout, whole, has_batch):
        torch.testing.assert_close(results, varlen(whole), rtol=1e-12, atol=1e-12)


def in_parts(whole, least_bytes):
    with mock.patch.object(_passes, "LEAST_BYTES", least_bytes):
        return on_rank(whole)


@pytest.mark.parametrize(
    "whole", [CASES[-1], CASES[2], CASES[5], CASES[18], PACKED(kv_heads=2)], ids=repr
)
def test_parts_of_messages(whole):
    """Messages are cut by heads and rows, as those of long sequences are."""
    for size, least_bytes in ((3, 1), (2, 300), (3, 2000)):
        assert_same(whole, together(whole, run(size, in_parts, whole, least_bytes)))


def arrives_meanwhile():
    """Waits for a message without a call of torch.distributed."""
    ranks = team_of("test", None).ring
    coming, leaving = torch.zeros(1 << 22), torch.ones(1 << 22)
    messages = [
        receive([coming], ranks, ranks.around(-1), 7, "receiving"),
        send([leaving], ranks, ranks.around(1), 7, "sending"),
    ]
    while not coming.all():
        pass
    for message in messages:
        message.wait()
    return True


def test_messages_travel_while_a_rank_computes():
    assert run(2, arrives_meanwhile) == [True, True]


def alike(number):
    """The average of values that are 1, by weights of scores that are all this number."""
    query, key, value = torch.zeros(2, 12, 4), torch.zeros(2, 12, 4), torch.ones(2, 12, 4)
    mask = torch.full((12, 12 * dist.get_world_size()), number)
    return ring_attention(query, key, value, mask, is_causal=True)


@pytest.mark.parametrize("number", [torch.finfo(torch.float32).min, -1e9, 0.0, 1e9])
def test_weights_of_huge_scores_add_up_to_one(number):
    """Their lse is the number alone: the logarithm of how many there are is rounded away."""
    for output in run(3, alike, number):
        torch.testing.assert_close(output, torch.ones_like(output))


def some_gradients(wanted):
    tensors, grads = Whole().tensors()
    local = {name: shard(x, -2) for name, x in tensors.items()}
    for name in wanted:
        local[name].requires_grad_()
    output, lse = ring_attention(**local, seqlen=50, return_lse=True)
    assert lse.grad_fn is not None
    output.backward(shard(grads["grad_output"], -2))
    return {name: x.grad for name, x in local.items() if x.requires_grad}


@pytest.mark.parametrize("wanted", [("query",), ("key",), ("value",), ("query", "value")])
def test_gradients_of_some(wanted):
    whole = Whole()
    tensors, grads = whole.tensors()
    leaves = leaves_of(tensors)
    qkv.attention(**leaves).backward(grads["grad_output"])
    found = together(whole, run(3, some_gradients, wanted))
    assert found.keys() == {*wanted}
    for name, grad in found.items():
        torch.testing.assert_close(grad, leaves[name].grad, rtol=1e-12, atol=1e-12)


class NoGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return None


def a_loss_without_gradient():
    """The second rank calls backward, but no gradient comes to its output."""
    tensors, grads = Whole().tensors()
    local = {name: shard(x, -2).requires_grad_() for name, x in tensors.items()}
    output = ring_attention(**local, seqlen=50)
    (output if dist.get_rank() == 0 else NoGradient.apply(output)).backward(
        shard(grads["grad_output"], -2)
    )
    return {name: x.grad for name, x in local.items()}


def test_a_rank_without_a_gradient():
    """It helps the other one to those of its keys and values."""
    tensors, grads = Whole().tensors()
    leaves = leaves_of(tensors)
    of_first = grads["grad_output"]
    of_first[..., 13:39, :] = 0  # chunks 1 and 2 of 4
    qkv.attention(**leaves).backward(of_first)
    found = together(Whole(), run(2, a_loss_without_gradient))
    for name, grad in found.items():
        torch.testing.assert_close(grad, leaves[name].grad, rtol=1e-12, atol=1e-12)


def without_gradients():
    tensors, _ = Whole(dtype=torch.bfloat16).tensors()
    local = [shard(x, -2) for x in tensors.values()]
    with torch.no_grad():
        output = ring_attention(*local, seqlen=50)
    return output.requires_grad, unshard(output, -2, seqlen=50)


@pytest.mark.bf16
def test_without_gradients():
    tensors, _ = Whole(dtype=torch.bfloat16).tensors()
    for requires_grad, output in run(2, without_gradients):
        assert not requires_grad
        # Each part's weights are rounded relative to its own largest one where products are of
        # bfloat16: 2^-8 of values of about 1.
        torch.testing.assert_close(output, qkv.attention(*tensors.values()), atol=2**-8, rtol=2**-6)


# bfloat16 does not tell these numbers apart.
MASK = 1000 + torch.arange(50.0).sin()


def under_autocast():
    """The results for float32 tensors under autocast, also backward, and for bfloat16 ones."""
    tensors, grads = Whole(dtype=torch.float32).tensors()
    grad = shard(grads["grad_output"], -2).bfloat16()
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        leaves = leaves_of({name: shard(x, -2).to(dtype) for name, x in tensors.items()})
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == torch.float32):
            mask = MASK.to(dtype)
            output = ring_attention(**leaves, attn_mask=mask, seqlen=50, is_causal=True)
            output.backward(grad)
        found.append({"output": output.detach(), **{n: x.grad for n, x in leaves.items()}})
    return found


@pytest.mark.bf16
def test_autocast():
    """As qkv.attention does under autocast; to the bit as for tensors of its dtype."""
    of_ranks = run(2, under_autocast)
    for cast, narrow in of_ranks:
        assert cast["output"].dtype == torch.bfloat16 and cast["query"].dtype == torch.float32
        assert all(torch.equal(x, narrow[name].to(x.dtype)) for name, x in cast.items())
    tensors, grads = Whole(dtype=torch.float32).tensors()
    leaves = leaves_of(tensors)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = qkv.attention(**leaves, attn_mask=MASK, is_causal=True)
    output.backward(grads["grad_output"].bfloat16())
    expected = {"output": output.detach(), **{n: x.grad for n, x in leaves.items()}}
    found = together(Whole(dtype=torch.float32), [cast for cast, _ in of_ranks])
    torch.testing.assert_close(found, expected, rtol=0.02, atol=0.02)


def spoilt(size):
    """A key and a value are NaN, another one is infinite; by one process if size is 0."""
    whole = Whole(seqlen=24, scalars=CAUSAL)
    tensors, grads = whole.tensors()
    tensors["key"][0, 0, 12] = tensors["value"][1, 1, 17] = math.nan
    tensors["value"][1, 2, 20] = math.inf
    if not size:
        leaves = leaves_of(tensors)
        return results_of(leaves, *qkv.attention(**leaves, **CAUSAL, return_lse=True), grads)
    leaves = leaves_of({name: shard(x, -2) for name, x in tensors.items()})
    grads = {name: shard(x, -1 if name == "grad_lse" else -2) for name, x in grads.items()}
    return results_of(leaves, *ring_attention(**leaves, **CAUSAL, return_lse=True), grads)


def test_nan_and_infinity():
    """They are where one process has them: what is hidden does not leak."""
    expected = spoilt(0)
    found = together(Whole(seqlen=24), run(3, spoilt, 3))
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12, equal_nan=True)
    assert expected["output"].isnan().any() and expected["output"].isfinite().any()


def spoilt_sinks(size):
    """One query sees nothing, others see keys of one rank alone, not all of their own."""
    tensors, grads = Whole(seqlen=24).tensors()
    sees = torch.eye(24, dtype=torch.bool).roll(5, 0)
    sees[3] = False
    sinks = torch.tensor([math.nan, math.inf, -math.inf, 1.0], dtype=torch.float64).requires_grad_()
    attend = functools.partial(ring_attention if size else qkv.attention, sinks=sinks)
    if size:
        tensors = {name: shard(x, -2) for name, x in tensors.items()}
        grads = {name: shard(x, -1 if name == "grad_lse" else -2) for name, x in grads.items()}
        sees = shard(sees, -2)
    leaves = leaves_of(tensors)
    return results_of(leaves, *attend(**leaves, attn_mask=sees, return_lse=True), grads)


def test_sinks_of_nan_and_infinity():
    expected, whole = spoilt_sinks(0), Whole(seqlen=24)
    found = together(whole, run(3, spoilt_sinks, 3))
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12, equal_nan=True)
    assert (expected["output"][:, :, 3] == 0).all() and expected["output"][:, :2, 4].isnan().all()


def with_checkpoint():
    tensors, _ = Whole().tensors()
    tensors |= {"sinks": torch.randn(4, dtype=torch.float64)}

    def attend(query, key, value, sinks):
        return ring_attention(query, key, value, dropout_p=0.3, seqlen=50, sinks=sinks)

    found = []
    for function in (attend, functools.partial(checkpoint, attend, use_reentrant=False)):
        torch.manual_seed(dist.get_rank())
        local = {n: shard(x, -2) if n != "sinks" else x for n, x in tensors.items()}
        leaves = leaves_of({name: x.detach().clone() for name, x in local.items()})
        function(*leaves.values()).square().sum().backward()
        found.append([x.grad for x in leaves.values()])
    return all(map(torch.equal, *found))


def test_checkpoint():
    """The same weights are dropped when the call is repeated."""
    assert run(2, with_checkpoint) == [True, True]


def broadcasts(mask):
    """Key and value have fewer batch items and heads than query."""
    query, key, value = torch.randn(2, 4, 8, 4), torch.randn(1, 1, 8, 4), torch.randn(4, 8, 4)
    found = []
    for attend, cut in ((qkv.attention, lambda x: x), (ring_attention, lambda x: shard(x, -2))):
        leaves = [cut(x.double()).requires_grad_() for x in (query, key, value)]
        output = attend(*leaves, mask, is_causal=True)
        (output * cut(torch.arange(8.0)[:, None])).sum().backward()
        found.append([output.detach(), *(x.grad for x in leaves)])
    alone, of_ring = found
    return [cut(x) for x in alone], of_ring


@pytest.mark.parametrize("mask", [None, torch.tensor(0.5).double()], ids=["none", "a_number"])
def test_broadcasting(mask):
    for expected, found in run(2, broadcasts, mask):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def compiled():
    tensors, _ = Whole().tensors()
    found = []

    def step(query, key, value):
        return ring_attention(2 * query, key, value, is_causal=True, seqlen=50).square().sum()

    for function in (step, torch.compile(step, backend="aot_eager")):
        leaves = leaves_of({name: shard(x, -2) for name, x in tensors.items()})
        loss = function(**leaves)
        loss.backward()
        found.append([loss, *(x.grad for x in leaves.values())])
    return all(map(torch.equal, *found))


@pytest.mark.long
def test_compiled():
    """Around the call: the graph breaks there."""
    assert run(2, compiled, timeout=600.0) == [True, True]


def graphs():
    """How many are compiled of a program, in two calls of it."""
    local = [shard(x, -2).requires_grad_() for x in Whole().tensors()[0].values()]

    @functools.partial(torch.compile, backend="eager")
    def step(query, key, value):
        output = ring_attention(2 * query, key, value, seqlen=50, method="heads")
        return unshard(output.sin(), -2, seqlen=50).square().sum()

    torch._dynamo.utils.counters.clear()
    for _ in range(2):
        step(*local).backward()
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def test_what_ranks_exchange_is_not_compiled():
    """What stands before a call, between two, and after them."""
    assert all(count <= 3 for count in run(2, graphs))


def other_derivatives():
    tensors, _ = Whole().tensors()
    local = [shard(x, -2).requires_grad_() for x in tensors.values()]
    attend = functools.partial(ring_attention, seqlen=50)
    messages = []
    (first,) = torch.autograd.grad(attend(*local).square().sum(), local[0], create_graph=True)
    for function in (
        lambda: torch.autograd.grad(first.sum(), local[0]),
        lambda: first.sum().backward(),
        lambda: torch.func.jvp(lambda q: attend(q, *local[1:]), (local[0],), (local[0],)),
    ):
        with pytest.raises(NotImplementedError) as error:
            function()
        messages.append(str(error.value))
    by_func = torch.func.grad(lambda q: attend(q, *local[1:]).square().sum())(local[0])
    return messages, torch.equal(by_func, first)


def test_other_derivatives_are_errors():
    for (second, same, forward), by_func in run(2, other_derivatives):
        for message in (second, same):
            assert message == (
                "ring_attention: a second derivative is asked for, but over a ring of ranks, and "
                "of packed documents with masks, there are only first derivatives, by backward; "
                'otherwise, with method="heads" or on one rank, there are all of them'
            )
        assert forward.startswith("ring_attention: forward mode is asked for, but over a ring")
        assert by_func


def same_bits():
    local = [shard(x, -2) for x in Whole().tensors()[0].values()]
    with qkv.reproducible():
        found = ring_attention(*local, seqlen=50, method="heads")
        with pytest.raises(NotImplementedError, match="ring_attention.*other bits on other CPUs"):
            ring_attention(*local, seqlen=50)
    return torch.allclose(found, ring_attention(*local, seqlen=50))


def test_a_ring_has_not_the_same_bits_on_every_cpu():
    assert all(run(2, same_bits))
