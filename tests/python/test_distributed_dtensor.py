"""Every operator on DTensors, whatever they are sharded over, against one process.

The functions that take a mesh run on every process of a world (distributed_world.py): each makes the
same tensors, computes the truth alone, and then its part of the DTensors' result.
"""

import itertools
import math
import random

import pytest
import samples
import strategies
import torch
from distributed_world import WorkerError, run
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.autograd import forward_ad
from torch.distributed.tensor import (
    DeviceMesh,
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_tensor,
    init_device_mesh,
)
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.experimental import implicit_replication
from torch.nn.functional import scaled_dot_product_attention

import qkv
import qkv.distributed
from qkv import testing

MESHES = [(2,), (3,), (2, 2)]


def on_mesh(shape, function, *args):
    """What function(mesh, *args) returns on rank 0 of as many processes as the mesh has."""
    return run(math.prod(shape), _call, shape, function, args)[0]


def _call(shape, function, args):
    return function(init_device_mesh("cpu", shape), *args)


def distribute(x, mesh, placements):
    """Of a tensor that is the same on all processes, without sending anything."""
    return distribute_tensor(x, mesh, placements, src_data_rank=None)


def any_placements(x, mesh, draw):
    """Replicated, or sharded along any of its dimensions, for each dimension of the mesh."""
    return [draw.choice([Replicate(), *map(Shard, range(x.dim()))]) for _ in range(mesh.ndim)]


def distribute_anyhow(call, mesh, draw):
    """The tensors of a call, and the lists of tensors, as DTensors."""

    def distributed(x):
        if isinstance(x, list) and isinstance(x[0], torch.Tensor):
            return [distributed(part) for part in x]
        if not isinstance(x, torch.Tensor):
            return x
        return distribute(x, mesh, any_placements(x, mesh, draw))

    return {name: distributed(x) for name, x in call.items()}


def same(found, expected):
    """Whether two tuples of tensors are equal to the rounding of sums in another order."""
    for x, y in zip(found, expected, strict=True):
        if y is None:
            assert x is None
        else:
            x = x.full_tensor() if isinstance(x, DTensor) else x
            torch.testing.assert_close(x, y, rtol=1e-11, atol=1e-12)


class TestAgrees:
    @pytest.mark.parametrize("mesh", MESHES, ids=str)
    @pytest.mark.parametrize("name", [n for n in samples.names() if n != "attention_with_kvcache"])
    def test_every_operator(self, name, mesh):
        on_mesh(mesh, every_call_agrees, name)

    @given(strategies.cases(max_work=3000), st.sampled_from([(1,), *MESHES, (4,)]), st.integers(0))
    def test_every_option_and_gradient(self, case, mesh, seed):
        on_mesh(mesh, case_agrees, case, seed)


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
    floating = {n: x for n, x in call.items() if isinstance(x, torch.Tensor) and x.is_floating_point()}
    floating = {n: x.detach() for n, x in floating.items()}
    expected = results_and_gradients(call, floating)
    found = distribute_anyhow(call, mesh, random.Random(seed))
    floating = {n: found[n] for n in floating}
    same(results_and_gradients(found, floating), expected)


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
    for _ in range(4):
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
