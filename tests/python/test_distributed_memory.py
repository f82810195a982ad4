"""A rank's memory: a quarter of what one process takes for the whole sequence, and little for what
is on its way."""

from pathlib import Path

import torch
import torch.distributed as dist
from distributed_world import run_fresh

import qkv
import qkv.distributed
from qkv.distributed import _passes

LENGTH, HEADS = 8192, 32
# Features of a head: so few that this takes seconds, and a whole vector of every instruction set,
# since a gradient's sums have whole vectors. Messages are made shorter by the same factor, so that
# memory is divided as it is with heads of 64 features, which is the usual number.
HEAD_DIM, USUAL = 16, 64


def memory(field):
    """MiB, by the name that /proc/self/status has for them."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(field))


def train(attention, length):
    shape = 1, HEADS, length, HEAD_DIM
    inputs = [torch.randn(shape, requires_grad=True) for _ in range(3)]
    output = attention(*inputs, is_causal=True)
    output.backward(torch.randn(shape))


def growth():
    """MiB by which forward and backward, and their inputs, add to a rank at their peak."""
    _passes.LEAST_BYTES = _passes.LEAST_BYTES * HEAD_DIM // USUAL
    size = dist.get_world_size()
    attention = qkv.attention if size == 1 else qkv.distributed.ring_attention
    train(attention, 64)  # connections and stacks
    Path("/proc/self/clear_refs").write_text("5")  # the peak restarts from what is resident now
    before = memory("VmRSS")
    train(attention, LENGTH // size)
    return memory("VmHWM") - before


def test_a_rank_takes_its_share():
    (alone,) = run_fresh(1, growth, timeout=600)
    ranks = run_fresh(4, growth, timeout=600)
    assert max(rank.result for rank in ranks) <= 0.3 * alone.result
