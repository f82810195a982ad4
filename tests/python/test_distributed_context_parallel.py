"""torch.distributed.tensor.experimental.context_parallel and its newer form, by qkv on CPUs."""

from unittest.mock import patch

import pytest
import torch
from distributed_world import WorkerError, run
from torch import nn
from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._attention import context_parallel_unshard
from torch.distributed.tensor.experimental._context_parallel import _attention as newer
from torch.distributed.tensor.experimental._context_parallel._load_balancer import (
    _HeadTailLoadBalancer,
)
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn import functional as F

import qkv
import qkv.distributed


def inputs(kv_heads=2):
    torch.manual_seed(0)
    shapes = (2, 4, 12, 8), *[(2, kv_heads, 12, 8)] * 2
    return [torch.randn(shape, dtype=torch.float64) for shape in shapes]


def by_sdpa(query, key, value, **options):
    with qkv.replace_sdpa():
        output = F.scaled_dot_product_attention(query, key, value, enable_gqa=True, **options)
        assert qkv.sdpa_report().taken == {"scaled_dot_product_attention": 1}
    return output


def alone(is_causal):
    leaves = [x.requires_grad_() for x in inputs()]
    output = qkv.attention(*leaves, is_causal=is_causal, enable_gqa=True)
    return output, *torch.autograd.grad(output.sin().sum(), leaves)


def same(mesh, found, expected, balancer=None):
    found = context_parallel_unshard(mesh, [x.detach() for x in found], [2] * len(found), balancer)
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y.detach(), rtol=1e-5, atol=1e-6)


def by_distance(score, batch, head, query, key):
    return score - (query - key).abs()


class TestContextParallel:
    @pytest.mark.parametrize("world_size", [2, 3])
    def test_sdpa(self, world_size):
        run(world_size, older_form_agrees)

    @pytest.mark.parametrize("balanced", [False, True])
    @pytest.mark.parametrize("attend", ["sdpa", "qkv"])
    def test_newer_form(self, attend, balanced):
        run(2, newer_form_agrees, attend, balanced)

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"window_size": (2, 0)}, r"window_size is \[2, 0\], but torch's context_parallel does "
             "not tell where in the sequence a part is; expected qkv.distributed.ring_attention"),
            ({"dropout_p": 0.5}, "dropout_p is 0.5, but torch's context_parallel does not tell "
             "where in the sequence a part is; expected qkv.distributed.ring_attention"),
            ({"bias": torch.zeros(1, 1, 6, 12)}, "bias is given, but torch's context_parallel "
             "passes query, key and value alone; expected qkv.distributed.ring_attention"),
            ({"score_mod": by_distance}, "score_mod is given, but torch's context_parallel does "
             "not tell where in the sequence a part is; expected qkv.distributed.ring_attention"),
        ],
    )  # fmt: skip
    def test_what_the_ring_does_not_pass_on(self, options, message):
        with pytest.raises(WorkerError, match=message):
            run(2, in_newer_form, options)

    def test_the_same_bits_on_every_cpu(self):
        with pytest.raises(WorkerError, match="attention_forward: what a ring's ranks add up has "
                           "other bits on other CPUs, but the same are asked for"):  # fmt: skip
            run(2, reproducibly)

    def test_tensors_that_are_divided_otherwise(self):
        """The gradient of a sum is the same number everywhere, and whole on every rank."""
        run(2, whole_ones_agree)

    def test_torch_alone(self):
        """What docs/distributed.md says of it."""
        kernel = "aten._scaled_dot_product_flash_attention_for_cpu.default"
        with pytest.raises(WorkerError, match=f"{kernel} does not have a sharding strategy"):
            run(2, torch_alone)

    def test_backward_after_it(self):
        with pytest.raises(WorkerError, match="attention_backward: output is .*, as torch's "
                           "context_parallel has it, but that is not active any more"):  # fmt: skip
            run(2, backward_outside)


def torch_alone():
    mesh, tensors = init_device_mesh("cpu", (2,)), inputs(kv_heads=4)
    with context_parallel(mesh, buffers=tensors, buffer_seq_dims=[2] * 3):
        F.scaled_dot_product_attention(*tensors, is_causal=True)


def backward_outside():
    mesh, tensors = init_device_mesh("cpu", (2,)), inputs()
    with context_parallel(mesh, buffers=tensors, buffer_seq_dims=[2] * 3):
        leaves = [x.clone().requires_grad_() for x in tensors]
        output = by_sdpa(*leaves, is_causal=True)
    output.sum().backward()


def whole_ones_agree():
    """DTensors of the caller's own, within the context."""
    mesh, tensors = init_device_mesh("cpu", (2,)), [x.requires_grad_() for x in inputs()]
    expected = qkv.attention(*tensors, enable_gqa=True, is_causal=True)
    expected = expected, *torch.autograd.grad(expected.sum(), tensors)
    placements = [Shard(2)], [Replicate()], [Shard(1)]
    in_order = patch.object(newer._cp_options, "enable_load_balance", False)
    with in_order, context_parallel(mesh, buffers=[torch.zeros(4)], buffer_seq_dims=[0]):
        parts = [
            distribute_tensor(x.detach(), mesh, p).requires_grad_()
            for x, p in zip(tensors, placements, strict=True)
        ]
        output = qkv.attention(*parts, enable_gqa=True, is_causal=True)
        found = output, *torch.autograd.grad(output.sum(), parts)
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x.full_tensor(), y, rtol=1e-5, atol=1e-6)


def older_form_agrees():
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    expected = alone(is_causal=True)
    tensors = inputs()
    with context_parallel(mesh, buffers=tensors, buffer_seq_dims=[2] * 3):
        leaves = [x.clone().requires_grad_() for x in tensors]
        output = by_sdpa(*leaves, is_causal=True)
        found = output, *torch.autograd.grad(output.sin().sum(), leaves)
        same(mesh, found, expected)


class Attention(nn.Module):
    def __init__(self, attend):
        super().__init__()
        self.attend = attend

    def forward(self, *tensors, **options):
        return self.attend(*tensors, **options)


def by_qkv(query, key, value, **options):
    attend = qkv.flex_attention if "score_mod" in options else qkv.attention
    return attend(query, key, value, enable_gqa=True, **options)


def newer_form_agrees(attend, balanced):
    expected = alone(is_causal=True)
    attend = {"sdpa": by_sdpa, "qkv": by_qkv}[attend]
    mesh, found, balancer = newer_form(attend, balanced, is_causal=True)
    same(mesh, found, expected, balancer)


def newer_form(attend, balanced, **options):
    mesh = init_device_mesh("cpu", (2,))
    style = newer._ContextParallel(2, newer._ContextParallel.AttentionType.SDPA)
    attention = parallelize_module(Attention(attend), mesh, style)
    balancer = _HeadTailLoadBalancer(12, 2, torch.device("cpu")) if balanced else None
    shards = newer._context_parallel_shard(mesh, inputs(), [2] * 3, balancer)
    leaves = [x.requires_grad_() for x in shards]
    newer._enable_context_parallel_dispatcher()
    try:
        output = attention(*leaves, **options)
        return mesh, (output, *torch.autograd.grad(output.sin().sum(), leaves)), balancer
    finally:
        newer._disable_context_parallel_dispatcher()


def in_newer_form(options):
    newer_form(by_qkv, False, **options)


def reproducibly():
    with qkv.reproducible():
        newer_form(by_qkv, False)
