"""Every operator on DTensors, whatever they are sharded over, against one process.

The functions that take a mesh run on every process of a world (distributed_world.py): each makes
the same tensors, computes the truth alone, and then its part of the DTensors' result.
"""

import math
import random

import pytest
import samples
import strategies
import torch
from distributed_world import WorkerError, run
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch.autograd import forward_ad
from torch.distributed.tensor import (
    DeviceMesh,
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
    init_device_mesh,
)
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.experimental import implicit_replication
from torch.nn.functional import scaled_dot_product_attention

import qkv
import qkv.distributed

MESHES = [(2,), (3,), (2, 2)]


def on_mesh(shape, function, *args, **options):
    """What function(mesh, *args) returns on rank 0 of as many processes as the mesh has."""
    return run(math.prod(shape), _call, shape, function, args, options)[0]


def _call(shape, function, args, options):
    return function(init_device_mesh("cpu", shape), *args, **options)


def distribute(x, mesh, placements):
    """Of a tensor that is the same on all processes, without sending anything. Of a sum, the first
    process has everything."""
    is_sum = [isinstance(placement, Partial) for placement in placements]
    whole = [Replicate() if p.is_partial() else p for p in placements]
    found = distribute_tensor(x, mesh, whole, src_data_rank=None)
    if not any(is_sum):
        return found
    local, place = found.to_local(), mesh.get_coordinate()
    if any(place[dim] for dim in range(mesh.ndim) if is_sum[dim]):
        local = torch.zeros_like(local)
    return DTensor.from_local(local, mesh, placements, shape=x.shape, stride=x.stride())


def any_placements(x, mesh, draw):
    """Replicated, a sum, or sharded along any dimension, for each dimension of the mesh."""
    possible = [Replicate(), *map(Shard, range(x.dim()))]
    if x.is_floating_point():
        possible.append(Partial("sum"))
    return [draw.choice(possible) for _ in range(mesh.ndim)]


def distribute_anyhow(call, mesh, draw):
    """The tensors of a call, and the lists of tensors, as DTensors."""

    def distributed(x):
        if isinstance(x, list) and isinstance(x[0], torch.Tensor):
            return [distributed(part) for part in x]
        if not isinstance(x, torch.Tensor):
            return x
        return distribute(x, mesh, any_placements(x, mesh, draw))

    return {name: distributed(x) for name, x in call.items()}


# Of sums in another order. An option's gradient is rounded to its dtype, in each part of a sum.
TOLERANCES = {torch.float64: 1e-11, torch.float32: 1e-6, torch.bfloat16: 2e-2}


def same(found, expected):
    for x, y in zip(found, expected, strict=True):
        if y is None:
            assert x is None
        else:
            x = x.full_tensor() if isinstance(x, DTensor) else x
            tolerance = TOLERANCES.get(y.dtype, 0)
            torch.testing.assert_close(x, y, rtol=tolerance, atol=tolerance / 10)


# A failure costs a world of processes: they are not tried again to make the example smaller.
few = settings(max_examples=strategies.one_example_in(3), phases=[Phase.explicit, Phase.generate])


class TestAgrees:
    @pytest.mark.one_in(2)
    @pytest.mark.parametrize("mesh", MESHES, ids=str)
    @pytest.mark.parametrize("name", [
        n for n in samples.names()
        if not n.endswith("with_kvcache")
        and n != "latent_attention"  # test_latent_attention
    ])  # fmt: skip
    def test_every_operator(self, name, mesh):
        on_mesh(mesh, every_call_agrees, name)

    @few
    @given(strategies.cases(max_work=3000), st.sampled_from([(1,), *MESHES, (4,)]), st.integers(0))
    def test_every_option_and_gradient(self, case, mesh, seed):
        on_mesh(mesh, case_agrees, case, seed)

    @pytest.mark.parametrize("mesh", MESHES, ids=str)
    def test_spans(self, mesh):
        on_mesh(mesh, spans_agree)


@pytest.mark.parametrize("dim", [0, 1], ids=["batch", "heads"])
def test_latent_attention(dim):
    """Its projections are torch's, which refuse what does not divide."""
    on_mesh((2,), latent_agrees, dim)


def latent_agrees(mesh, dim):
    for call in samples.calls("latent_attention"):
        call = {n: x for n, x in call.items() if not n.startswith("score_")}
        call |= {"dropout_p": 0.0, "sinks": None, "alibi_slopes": None, "bias": None}
        expected = samples.results("latent_attention", call)

        def placement(name):
            if name.endswith("_weight"):
                return Shard(0) if dim == 1 else Replicate()
            whole = name == "attn_mask" or (dim == 1 and not name.startswith("query"))
            return Replicate() if whole else Shard(dim)

        parts = {
            n: distribute(x, mesh, [placement(n)])
            for n, x in call.items() if isinstance(x, torch.Tensor)
        }  # fmt: skip
        found = samples.results("latent_attention", call | parts)
        assert found["output"].placements == (Shard(dim),)
        same(found.values(), expected.values())


ROTATED = ("query", "key", "cos", "sin", "query_weight", "key_weight")


class TestRotate:
    """Batch, heads and sequence are divided, and nothing is sent; key has fewer heads."""

    @pytest.mark.parametrize("kv_heads", [2, 1])
    @pytest.mark.parametrize("dims", [(0,), (1,), (2,), (0, 1), (1, 2), (1, 1)], ids=str)
    def test_placements(self, dims, kv_heads):
        results, gradients, sent = on_mesh((2,) * len(dims), rotation, kv_heads, dims)
        rows, partial = tuple(Shard(dim) for dim in dims), Partial("sum")
        tables = tuple(Shard(0) if dim == 2 else partial for dim in dims)
        weights = (partial,) * len(dims)
        assert results == [rows] * 2 and sent == 0
        assert gradients == [rows, rows, tables, tables, weights, weights]

    @pytest.mark.parametrize("with_norm", [True, False])
    def test_derivatives(self, with_norm):
        on_mesh((2,), rotated_derivatives, with_norm)

    def test_a_batch_of_one(self):
        """Which one process has alone. It is no broadcast, whose parts were added up."""
        results, _, sent = on_mesh((2,), rotation, 2, (0,), 1)
        assert results == [(Shard(0),)] * 2 and sent == 0

    def test_rows_are_whole(self):
        results, _, _ = on_mesh((2,), rotation, 2, (3,))
        assert results == [(Replicate(),)] * 2


def rotation_inputs(kv_heads, batch=3, length=5):
    torch.manual_seed(0)
    rows = (length, 8), (length, 3)
    shapes = (batch, 4, *rows[0]), (batch, kv_heads, *rows[0]), rows[1], rows[1], (8,), (8,)
    return [torch.randn(shape, dtype=torch.float64) for shape in shapes]


def rotate(*tensors):
    weights = dict(zip(ROTATED[4:], tensors[4:], strict=False))
    return qkv.rotate(*tensors[:4], **weights, interleaved=True)


def rotation(mesh, kv_heads, dims, batch=3):
    """Compares with one process. dims: of query and key, which each dimension of the mesh divides.
    Returns the placements of the results and of all gradients, and how many collectives there
    were."""
    leaves = [x.requires_grad_() for x in rotation_inputs(kv_heads, batch)]
    expected = rotate(*leaves)
    incoming = [x.detach().sin() for x in expected]
    wanted = torch.autograd.grad(expected, leaves, incoming)
    tables = [Shard(0) if dim == 2 else Replicate() for dim in dims]
    whole = [Replicate()] * len(dims)
    placements = [[Shard(dim) for dim in dims]] * 2 + [tables] * 2 + [whole] * 2
    parts = [
        distribute(x.detach(), mesh, p).requires_grad_()
        for x, p in zip(leaves, placements, strict=True)
    ]
    incoming = [distribute(x, mesh, placements[0]) for x in incoming]
    with CommDebugMode() as collectives:
        results = rotate(*parts)
        gradients = torch.autograd.grad(results, parts, incoming)
    sent = collectives.get_total_counts()
    same(results, expected)
    same(gradients, wanted)
    return [x.placements for x in results], [x.placements for x in gradients], sent


def rotated_derivatives(mesh, with_norm):
    """Of key alone, and in forward mode. Without a norm a Node keeps no query."""
    plain = rotation_inputs(2, batch=2, length=4)[: 6 if with_norm else 4]

    def backward(tensors):
        leaves = [x.detach().requires_grad_(i < 2) for i, x in enumerate(tensors)]
        loss = rotate(*leaves)[1].sin().sum()
        return torch.autograd.grad(loss, leaves[:2], allow_unused=True)

    def forward(tensors):
        return torch.func.jvp(rotate, tuple(tensors), tuple(x.cos() for x in tensors))[1]

    for dim in (0, 1, 2):
        tables = Shard(0) if dim == 2 else Replicate()
        placements = [Shard(dim)] * 2 + [tables] * 2 + [Replicate()] * 2
        parts = [distribute(x, mesh, [p]) for x, p in zip(plain, placements, strict=False)]
        same(backward(parts), backward(plain))
        same(forward(parts), forward(plain))


def every_call_agrees(mesh, name):
    draw = random.Random(name)
    for call in samples.calls(name):
        torch.manual_seed(1)
        expected = samples.results(name, call)
        for _ in range(2):
            torch.manual_seed(1)
            found = samples.results(name, distribute_anyhow(call, mesh, draw))
            same(found.values(), expected.values())


def case_agrees(mesh, case, seed):
    inputs, options = case.tensors(torch.float64)
    options.pop("dropout_seed", None)  # qkv.attention draws its own
    call = dict(zip(samples.INPUTS, inputs, strict=True)) | options
    floating = {
        n: x for n, x in call.items() if isinstance(x, torch.Tensor) and x.is_floating_point()
    }
    floating = {n: x.detach() for n, x in floating.items()}
    expected = results_and_gradients(call, floating)
    found = distribute_anyhow(call, mesh, random.Random(seed))
    floating = {n: found[n] for n in floating}
    same(results_and_gradients(found, floating), expected)


def spans_agree(mesh):
    """Of each head of each batch item, sharded as a mask may be."""
    draw, call = random.Random("spans"), samples.inputs(torch.float64) | {"enable_gqa": True}
    seen = torch.rand(2, samples.H, samples.L, samples.S) > 0.4
    spans = qkv.Spans.from_mask(seen)
    floating = {n: call[n] for n in samples.INPUTS}
    expected = results_and_gradients(call | {"attn_mask": seen}, floating)
    for _ in range(4):
        found = distribute_anyhow(call | {"spans": spans.tensor}, mesh, draw)
        found["spans"] = qkv.Spans(found["spans"])
        same(results_and_gradients(found, {n: found[n] for n in floating}), expected)


def results_and_gradients(call, floating):
    """Of qkv.attention, with respect to the tensors named in `floating`."""
    leaves = {n: x.detach().requires_grad_() for n, x in floating.items()}
    torch.manual_seed(1)
    output, lse = qkv.attention(**(call | leaves), return_lse=True)
    loss = output.sin().sum() + lse.masked_fill(lse.isinf(), 0).cos().sum()
    return output, lse, *torch.autograd.grad(loss, [*leaves.values()])


class TestDerivatives:
    @pytest.mark.parametrize("derivative", ["twice", "forward", "reverse_over_forward", "tangents"])
    def test_agrees(self, derivative):
        on_mesh((2, 2), derivative_agrees, derivative)


def derivative_agrees(mesh, name):
    draw = random.Random(name)
    call = samples.inputs(torch.float64) | samples.options(torch.float64)
    expected = DERIVATIVES[name](call)
    for _ in range(2):
        same(DERIVATIVES[name](distribute_anyhow(call, mesh, draw)), expected)


def attend(leaves):
    return qkv.attention(**leaves, is_causal=True, enable_gqa=True, softcap=2.0, return_lse=True)


def loss_of(leaves):
    output, lse = attend(leaves)
    return output.sin().sum() + lse.sin().sum()


def twice(call):
    leaves = {n: x.detach().requires_grad_() for n, x in call.items()}
    first = torch.autograd.grad(loss_of(leaves), [*leaves.values()], create_graph=True)
    return torch.autograd.grad(sum(x.sin().sum() for x in first), [*leaves.values()])


def forward(call):
    tangents = {n: x.cos() for n, x in call.items()}
    with forward_ad.dual_level():
        duals = {n: forward_ad.make_dual(x, tangents[n]) for n, x in call.items()}
        by_duals = [forward_ad.unpack_dual(x).tangent for x in attend(duals)]
    return *by_duals, *torch.func.jvp(attend, (call,), (tangents,))[1]


def reverse_over_forward(call):
    tangents = {n: x.cos() for n, x in call.items()}
    leaves = {n: x.detach().requires_grad_() for n, x in call.items()}
    moved = torch.func.jvp(attend, (leaves,), (tangents,))[1]
    return torch.autograd.grad(sum(x.sin().sum() for x in moved), [*leaves.values()])


def tangents(call):
    """By qkv.attention_jvp, which needs no forward mode of torch's."""
    leaves = {n: x.detach().requires_grad_() for n, x in call.items()}
    given = {f"{n}_tangent": x.cos() for n, x in call.items()}
    found = qkv.attention_jvp(**leaves, **given, is_causal=True, enable_gqa=True)
    return *found, *torch.autograd.grad(sum(x.sin().sum() for x in found), [*leaves.values()])


DERIVATIVES = {f.__name__: f for f in (twice, forward, reverse_over_forward, tangents)}


def inputs(batch=2, heads=4, kv_heads=4, length=5):
    torch.manual_seed(0)
    shapes = (batch, heads, length, 8), *[(batch, kv_heads, length, 8)] * 2
    return [torch.randn(shape, dtype=torch.float64) for shape in shapes]


def placements_of(mesh, tensors, placements, **options):
    """Compares a call and its gradients with one process. Returns the placements of the results,
    the gradients of `tensors` and the options' by name, and how many collectives there were.
    placements: of each of the tensors; options are replicated."""
    options = {n: x if isinstance(x, bool) else x.double() for n, x in options.items()}
    call = dict(zip(samples.INPUTS, tensors, strict=True)) | options
    leaves = {n: x.requires_grad_() for n, x in call.items() if isinstance(x, torch.Tensor)}
    output, lse = qkv.attention(**call, return_lse=True)
    expected = torch.autograd.grad(output.sin().sum() + lse.sin().sum(), [*leaves.values()])
    given = dict(zip(samples.INPUTS, placements, strict=True))
    parts = {
        n: distribute(x.detach(), mesh, given.get(n, [Replicate()] * mesh.ndim)).requires_grad_()
        for n, x in leaves.items()
    }
    with CommDebugMode() as collectives:
        results = qkv.attention(**(call | parts), return_lse=True)
        loss = results[0].sin().sum() + results[1].sin().sum()
        gradients = torch.autograd.grad(loss, [*parts.values()])
    same(results, (output, lse))
    same(gradients, expected)
    found = dict(zip(parts, [x.placements for x in gradients], strict=True))
    return results[0].placements, results[1].placements, found, collectives.get_total_counts()


class TestPlacements:
    """What is sharded stays sharded, and nothing is sent."""

    @pytest.mark.parametrize("dim", [0, 1])
    def test_batch_and_heads(self, dim):
        shard = [Shard(dim)]
        output, lse, grads, sent = on_mesh((2,), placements_of, inputs(), [shard] * 3)
        assert output == lse == (Shard(dim),)
        assert grads == dict.fromkeys(samples.INPUTS, (Shard(dim),))
        assert sent == 0

    def test_batch_and_heads_at_once(self):
        shards = (Shard(0), Shard(1))
        output, lse, grads, sent = on_mesh((2, 2), placements_of, inputs(), [shards] * 3)
        assert output == lse == shards and set(grads.values()) == {shards} and sent == 0

    def test_parts_of_different_sizes(self):
        """3 heads, 2 and 1."""
        tensors = inputs(heads=3, kv_heads=3)
        output, _, grads, sent = on_mesh((2,), placements_of, tensors, [[Shard(1)]] * 3)
        assert output == (Shard(1),) and set(grads.values()) == {(Shard(1),)} and sent == 0

    @pytest.mark.parametrize(
        ("option", "shape", "by_batch", "by_heads"),
        [
            ("bias", (4, 5, 5), Partial("sum"), Shard(0)),
            ("bias", (2, 1, 1, 5), Shard(0), Partial("sum")),
            ("bias", (5, 5), Partial("sum"), Partial("sum")),
            ("attn_mask", (2, 4, 5, 5), Shard(0), Shard(1)),
            ("attn_mask", (1, 4, 1, 5), Partial("sum"), Shard(1)),
            ("alibi_slopes", (4,), Partial("sum"), Shard(0)),
            ("alibi_slopes", (2, 1), Shard(0), Partial("sum")),
            ("sinks", (4,), Partial("sum"), Shard(0)),
            ("sinks", (2, 4), Shard(0), Shard(1)),
        ],
    )
    def test_gradients_of_options(self, option, shape, by_batch, by_heads):
        """Each process sums over its own part of what an option broadcasts to."""
        for dim, expected in enumerate((by_batch, by_heads)):
            *_, grads, sent = on_mesh(
                (2,), placements_of, inputs(), [[Shard(dim)]] * 3, **{option: torch.rand(shape)}
            )
            assert grads[option] == (expected,) and sent == 0

    def test_what_a_key_broadcasts_over(self):
        """Keys and values for all items of the batch."""
        query, key, value = inputs()
        placements = [[Shard(0)], [Replicate()], [Replicate()]]
        output, _, grads, sent = on_mesh(
            (2,), placements_of, [query, key[0], value[:1]], placements
        )
        assert output == grads["query"] == (Shard(0),)
        assert grads["key"] == grads["value"] == (Partial("sum"),) and sent == 0

    def test_packed_documents(self):
        """Divided by heads, with dropout."""
        on_mesh((2,), packed_stay)

    def test_sequence_becomes_heads(self):
        """What is sharded over the sequence is sharded over the heads instead, if there are enough
        of them, and replicated otherwise."""
        sequence = [[Shard(2)]] * 3
        assert on_mesh((2,), placements_of, inputs(), sequence)[0] == (Shard(1),)
        assert on_mesh((2,), placements_of, inputs(1, 1, 1), sequence)[0] == (Replicate(),)


def packed_stay(mesh):
    call = samples.documents(torch.float64) | {"max_q": 6, "max_k": 6, "enable_gqa": True}
    parts = {
        n: distribute(x, mesh, [Shard(1) if n in samples.INPUTS else Replicate()])
        for n, x in call.items()
        if isinstance(x, torch.Tensor)
    }
    with CommDebugMode() as collectives:
        output, lse = torch.ops.qkv.varlen_attention(**(call | parts))
    assert (output.placements, lse.placements) == ((Shard(1),), (Shard(0),))
    assert collectives.get_total_counts() == 0
    for dropout_p in (0.0, 0.3):
        torch.manual_seed(1)
        found = torch.ops.qkv.varlen_attention(**(call | parts), dropout_p=dropout_p)
        torch.manual_seed(1)
        same(found, torch.ops.qkv.varlen_attention(**call, dropout_p=dropout_p))
        assert found[0].placements == (Shard(1),)


class TestGroupedHeads:
    def test_divided(self):
        tensors = inputs(heads=8, kv_heads=4)
        _, _, grads, sent = on_mesh((4,), placements_of, tensors, [[Shard(1)]] * 3, enable_gqa=True)
        assert set(grads.values()) == {(Shard(1),)} and sent == 0

    @pytest.mark.parametrize("kv_heads", [1, 2])
    def test_fewer_than_processes(self, kv_heads):
        """Keys and values are replicated, and a process takes the head that its queries read."""
        placements = [[Shard(1)], [Replicate()], [Replicate()]]
        output, _, grads, sent = on_mesh(
            (4,), placements_of, inputs(heads=8, kv_heads=kv_heads), placements, enable_gqa=True
        )
        assert output == grads["query"] == (Shard(1),) and sent == 0
        assert grads["key"] == grads["value"] == (Partial("sum"),)

    def test_divided_by_some_dimensions_of_the_mesh(self):
        """Two key/value heads on 2 x 2 processes: the first dimension divides them."""
        some, both = (Shard(1), Replicate()), (Shard(1), Shard(1))
        output, _, grads, sent = on_mesh(
            (2, 2), placements_of, inputs(heads=8, kv_heads=2), [both, some, some], enable_gqa=True
        )
        assert output == grads["query"] == both and sent == 0
        assert grads["key"] == grads["value"] == (Shard(1), Partial("sum"))

    def test_key_and_value_differ(self):
        query, key, _ = inputs(heads=8, kv_heads=4)
        value = inputs(kv_heads=2)[2]
        placements = [[Shard(1)], [Shard(1)], [Replicate()]]
        *_, grads, sent = on_mesh(
            (4,), placements_of, [query, key, value], placements, enable_gqa=True
        )
        assert (grads["key"], grads["value"]) == ((Shard(1),), (Partial("sum"),)) and sent == 0

    def test_groups_that_would_be_cut(self):
        """6 query heads on 2 processes would be 1.5 groups each."""
        output, _, _, sent = on_mesh(
            (2,), placements_of, inputs(heads=6, kv_heads=3), [[Shard(1)]] * 3, enable_gqa=True
        )
        assert output == (Replicate(),) and sent > 0


class TestCache:
    """attention_with_kvcache, whose caches are written to where they are."""

    @pytest.mark.parametrize("number", [0, 1, 2])
    @pytest.mark.parametrize("dim", [None, 0, 1])
    def test_agrees(self, number, dim):
        on_mesh((2,), cache_agrees, number, dim)

    def test_one_number_for_all_lengths(self):
        """It is no plain tensor beside DTensors, which is refused."""
        on_mesh((2,), one_number)

    def test_more_processes_than_heads(self):
        """Every process appends all heads to its copy."""
        on_mesh((4,), cache_agrees, 0, None)

    def test_a_cache_is_not_moved(self):
        with pytest.raises(
            WorkerError,
            match=r"attention_with_kvcache: k_cache is \(Shard\(dim=2\),\), "
            r"but \(Shard\(dim=1\),\) is expected for something to be appended to it",
        ):
            on_mesh((2,), append_to, {"k_cache": [Shard(2)], "v_cache": [Shard(2)]})


def call_of_a_cache(number):
    """Without a score program, which would have to be told where a process's heads are."""
    call = samples.calls("attention_with_kvcache")[number]
    return {name: x for name, x in call.items() if not name.startswith("score_")}


def cache_agrees(mesh, number, dim):
    """dim: along which the caches are sharded, and the query; all else is replicated."""
    call = call_of_a_cache(number)
    pooled = "block_table" in call or "cache_batch_idx" in call
    parts = {}
    for n, x in call.items():
        if isinstance(x, torch.Tensor):
            follows = dim is not None and n in ("query", "k_cache", "v_cache")
            is_there = follows and not (dim == 0 and pooled)
            parts[n] = distribute(x.clone(), mesh, [Shard(dim) if is_there else Replicate()])
    expected = samples.results("attention_with_kvcache", call)
    found = samples.results("attention_with_kvcache", call | parts)
    same(found.values(), expected.values())
    same([parts["k_cache"], parts["v_cache"]], [call["k_cache"], call["v_cache"]])


def one_number(mesh):
    query, key, value, *caches = torch.randn(5, 2, 4, 8, 16)
    expected = qkv.attention(query, key, value, is_causal=True)
    for placement in (Shard(0), Shard(1), Replicate()):
        inputs = [distribute(x, mesh, [placement]) for x in (query, *caches, key, value)]
        found = qkv.attention_with_kvcache(*inputs, cache_seqlens=0, causal=True)
        same([found], [expected])


def append_to(mesh, placements):
    call = call_of_a_cache(0)
    replicated = [Replicate()] * mesh.ndim
    parts = {
        n: distribute(x, mesh, placements.get(n, replicated))
        for n, x in call.items()
        if isinstance(x, torch.Tensor)
    }
    samples.results("attention_with_kvcache", call | parts)


class TestDropout:
    """The same weights are dropped as by one process."""

    @pytest.mark.parametrize("placements", [(0, 0), (1, 1), (0, 1), (1, 0)])
    def test_in_parts(self, placements):
        on_mesh((2, 2), dropout_agrees, [Shard(dim) for dim in placements])

    def test_in_parts_of_different_sizes(self):
        """8 heads on 3 processes: 3, 3 and 2."""
        on_mesh((3,), dropout_agrees, [Shard(1)])

    def test_in_an_inner_dimension_of_the_batch(self):
        """Those parts have no place in one row: what was divided is put together again."""
        on_mesh((2,), dropout_agrees_in_5d)

    def test_one_seed_for_all(self):
        """Also where the processes' generators are in different states."""
        found = run(3, dropped_in_states_of_their_own)
        assert all(torch.equal(x, found[0]) for x in found)


def dropout_agrees(mesh, placements):
    tensors = inputs(batch=4, heads=8, kv_heads=8)
    found = dropped([distribute(x, mesh, placements) for x in tensors])
    same(found, dropped(tensors))
    assert found[0].placements == tuple(placements)


def dropout_agrees_in_5d(mesh):
    tensors = [x.unflatten(0, (2, 2)) for x in inputs(batch=4)]
    for dim in range(3):
        same(dropped([distribute(x, mesh, [Shard(dim)]) for x in tensors]), dropped(tensors))


def dropped(tensors):
    leaves = [x.detach().requires_grad_() for x in tensors]
    torch.manual_seed(1)
    output = qkv.attention(*leaves, dropout_p=0.4)
    return output, *torch.autograd.grad(output.sin().sum(), leaves)


def dropped_in_states_of_their_own():
    mesh = init_device_mesh("cpu", (3,))
    torch.manual_seed(mesh.get_rank())
    tensors = [torch.ones(3, 2, 4, 8)] * 3
    parts = [distribute(x, mesh, [Shard(0)]) for x in tensors]
    found = qkv.attention(*parts, dropout_p=0.5).full_tensor()
    seed = torch.ops.qkv.dropout_seed(parts[0]).to_local()
    assert len({int(x) for x in DTensor.from_local(seed, mesh, [Shard(0)]).full_tensor()}) == 1
    assert 0 < (found == 0).sum() + (found != 1).sum() < 2 * found.numel()
    return found


class TestWhatElseTorchDoes:
    @pytest.mark.parametrize(
        "way", ["inference", "sdpa", "compiled", "compiled_places", "autocast", "viewed"]
    )
    def test_agrees(self, way):
        on_mesh((2,), way_agrees, way)


def way_agrees(mesh, name):
    tensors = [x.float() for x in inputs()]
    parts = [distribute(x, mesh, [Shard(1)]) for x in tensors]
    found, expected = WAYS[name](*parts), WAYS[name](*tensors)
    assert found.dtype == expected.dtype and Shard(1) in found.placements
    same([found], [expected])


def inference(*tensors):
    with torch.inference_mode():
        return qkv.attention(*tensors, is_causal=True)


def sdpa(*tensors):
    with qkv.replace_sdpa():
        output = scaled_dot_product_attention(*tensors, is_causal=True)
        assert qkv.sdpa_report().taken == {"scaled_dot_product_attention": 1}
    return output


def compiled(*tensors):
    leaves = [x.detach().requires_grad_() for x in tensors]
    function = torch.compile(
        lambda *x: qkv.attention(*x, is_causal=True).sin(), fullgraph=True, backend="aot_eager"
    )
    return sum(torch.autograd.grad(function(*leaves).sum(), leaves))


def compiled_places(query, key, value):
    """Dropout and score functions depend on where in the whole a process's heads are. That must
    be no number of a tensor, which nobody knows while torch.compile traces."""

    def f(query, key, value):
        dropped = qkv.attention(query, key, value, dropout_p=0.5)
        scored = qkv.flex_attention(query, key, value, score_mod=lambda s, b, h, i, j: s + h * j)
        return dropped + scored

    torch.manual_seed(1)
    return torch.compile(f, fullgraph=True, backend="aot_eager")(query, key, value)


def autocast(*tensors):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return qkv.attention(*tensors)


def viewed(*tensors):
    """Of a query that is [B, L, H, D] in memory, whose output is laid out like that, too."""
    query, key, value = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in tensors)
    output = qkv.attention(query, key, value)
    assert output.transpose(1, 2).is_contiguous()
    return output.transpose(1, 2).flatten(2).unflatten(2, (4, 8)).transpose(1, 2)


WAYS = {f.__name__: f for f in (inference, sdpa, compiled, compiled_places, autocast, viewed)}


@pytest.mark.parametrize("dim", [0, 1])
def test_tables_in_parts_of_different_sizes(dim):
    """What a score function captures: torch flattens no such DTensor."""
    on_mesh((2,), tables_agree, dim)


def tables_agree(mesh, dim):
    def attend(query, key, value, table, numbers):
        table = table.detach().requires_grad_()
        output = qkv.flex_attention(
            query, key, value, score_mod=lambda s, b, h, i, j: s + table[h, j] * numbers[i, h]
        )
        return output, *torch.autograd.grad(output.sin().sum(), table)

    table = torch.randn(3, 5, dtype=torch.float64)
    tensors = [*inputs(heads=3, kv_heads=3), table, torch.arange(15).view(5, 3)]
    found = attend(*(distribute(x, mesh, [Shard(dim)]) for x in tensors))
    same(found, attend(*tensors))


class TestErrors:
    def test_a_tensor_that_is_none_of_dtensors(self):
        expected = (
            r"attention_forward: bias is a torch.Tensor, but query is a DTensor; expected a "
            r"DTensor, too: DTensor.from_local\(bias, mesh\) if all processes have the same "
            r"one, or distribute_tensor\(bias, mesh, placements\)"
        )
        with pytest.raises(WorkerError, match=expected):
            on_mesh((2,), with_a_plain_bias)

    def test_int8_caches(self):
        expected = (
            "k_scale or v_scale is given, but int8 keys and values are not implemented for DTensors"
        )
        with pytest.raises(WorkerError, match=expected):
            on_mesh((2,), with_an_int8_cache)

    def test_but_torch_may_be_told_that_it_is_replicated(self):
        on_mesh((2,), with_a_plain_bias_within)
        on_mesh((2,), a_layer_that_rotates)

    @pytest.mark.parametrize("name, shape, message", [
        ("sinks", (2,), r"attention: sinks has the shape \[2\], which does not broadcast to"),
        ("bias", (2, 5, 5), r"attention: bias has the shape \[2, 5, 5\], which does not broadcast"),
        ("key", (2, 2, 5, 8), "attention: key has 2 heads and query 4, but they must be equal"),
    ])  # fmt: skip
    def test_what_fits_a_part_alone(self, name, shape, message):
        """Two heads, where each process has two of the query's four."""
        with pytest.raises(WorkerError, match=message):
            on_mesh((2,), with_tensor, name, shape)

    def test_two_meshes(self):
        with pytest.raises(
            WorkerError,
            match="(?s)attention_forward: key is on DeviceMesh.*but query "
            "on DeviceMesh.*; expected one mesh for all tensors",
        ):
            on_mesh((2, 2), on_two_meshes)

    def test_a_process_without_a_place_in_the_mesh(self):
        with pytest.raises(
            WorkerError,
            match="attention_forward: query is on DeviceMesh.*in which rank "
            "2 has no place; expected calls from the ranks of the mesh alone",
        ):
            run(3, outside_the_mesh)


def with_a_plain_bias(mesh):
    tensors = [distribute(x, mesh, [Shard(1)]) for x in inputs()]
    return qkv.attention(*tensors, bias=torch.ones(5, 5, dtype=torch.float64))


def with_tensor(mesh, name, shape):
    call = dict(zip(samples.INPUTS, inputs(), strict=True))
    call = {n: distribute(x, mesh, [Shard(1)]) for n, x in call.items()}
    x = torch.ones(shape, dtype=torch.float64)
    qkv.attention(**call | {name: distribute(x, mesh, [Replicate()])})


def with_an_int8_cache(mesh):
    caches = dict.fromkeys(("k_cache", "v_cache"), torch.zeros(1, 2, 4, 8, dtype=torch.int8))
    tensors = caches | dict.fromkeys(("k_scale", "v_scale"), torch.ones(1, 2, 4))
    tensors |= {"query": torch.randn(1, 2, 1, 8), "cache_seqlens": torch.tensor([4]).int()}
    given = {name: distribute(x, mesh, [Replicate()]) for name, x in tensors.items()}
    qkv.attention_with_kvcache(**given)


def with_a_plain_bias_within(mesh):
    with implicit_replication():
        found = with_a_plain_bias(mesh)
    same([found], [qkv.attention(*inputs())])


def a_layer_that_rotates(mesh):
    """Its tables are its own, and plain."""
    layer, x = qkv.nn.SelfAttention(16, 4, 2, rotary=100.0), torch.randn(2, 6, 16)
    expected = layer(x)
    distribute_module(layer, mesh)
    parts = distribute(x, mesh, [Shard(0)])
    with pytest.raises(RuntimeError, match="cos is a torch.Tensor, but query is a DTensor"):
        layer(parts)
    with implicit_replication():
        same([layer(parts)], [expected])


def on_two_meshes(mesh):
    query, key, value = (distribute(x, mesh, [Replicate()] * 2) for x in inputs())
    key = distribute(key.full_tensor(), init_device_mesh("cpu", (4,)), [Replicate()])
    qkv.attention(query, key, value)


def outside_the_mesh():
    mesh = DeviceMesh("cpu", [0, 1])
    qkv.attention(*(distribute(x, mesh, [Shard(1)]) for x in inputs()))


class TestSecondDerivativesOfWeights:
    """They have no kernel, but are made of torch's operators, so that it depends on these what can
    be sharded."""

    @pytest.mark.parametrize("dim", [0, 1])
    def test_agrees(self, dim):
        on_mesh((2,), weights_agree_twice, dim)


def weights_agree_twice(mesh, dim):
    call = samples.inputs(torch.float64) | samples.options(torch.float64)
    parts = {
        n: distribute(x, mesh, [Shard(dim) if n in samples.INPUTS else Replicate()])
        for n, x in call.items()
    }
    same(weights_twice(parts), weights_twice(call))


def weights_twice(call):
    leaves = {n: x.detach().requires_grad_() for n, x in call.items()}
    found = qkv.attention_with_weights(**leaves, **samples.SCORES)
    loss = sum(x.sin().sum() for x in found)
    first = torch.autograd.grad(loss, [*leaves.values()], create_graph=True)
    return torch.autograd.grad(sum(x.sin().sum() for x in first), [*leaves.values()])
