"""Training steps of a small transformer, as torch.distributed parallelizes them, against one
process: tensor parallel plans, DDP and FSDP2, with checkpointing and autocast."""

import copy

import pytest
import torch
import torch.distributed as dist
from distributed_world import run
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.functional import scaled_dot_product_attention
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import qkv
import qkv.distributed

WIDTH, HEADS, LENGTH, BATCH = 32, 8, 6, 4


class Attention(nn.Module):
    """Grouped heads. attend(query, key, value) gets [B, H, L, D], and twice [B, Hkv, L, D]."""

    def __init__(self, attend, kv_heads):
        super().__init__()
        self.attend = attend
        kv_width = WIDTH // HEADS * kv_heads
        self.query = nn.Linear(WIDTH, WIDTH)
        self.key = nn.Linear(WIDTH, kv_width)
        self.value = nn.Linear(WIDTH, kv_width)
        self.output = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        def heads(projected):
            return projected.unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)

        output = self.attend(heads(self.query(x)), heads(self.key(x)), heads(self.value(x)))
        return self.output(output.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, attend, kv_heads):
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])
        self.attention = Attention(attend, kv_heads)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        x = x + self.attention(self.norms[0](x))
        return x + self.down(self.up(self.norms[1](x)).relu())


class Model(nn.Module):
    def __init__(self, attend, kv_heads=4, checkpoints=False):
        super().__init__()
        self.blocks = nn.ModuleList([Block(attend, kv_heads) for _ in range(2)])
        self.checkpoints = checkpoints

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpoints else block(x)
        return x


def by_qkv(query, key, value):
    return qkv.attention(query, key, value, is_causal=True, enable_gqa=True)


def by_sdpa(query, key, value):
    with qkv.replace_sdpa():
        output = scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        assert qkv.sdpa_report().taken == {"scaled_dot_product_attention": 1}
    return output


def data(step, dtype):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(BATCH, LENGTH, WIDTH, generator=generator).to(dtype)


def train(model, part=slice(None), autocast=False):
    """Two steps, on this part of each batch. Returns the losses, and then all parameters, whole."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    dtype = next(model.parameters()).dtype
    losses = []
    for step in range(2):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            loss = model(data(step, dtype)[part]).float().square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    named = {n.removeprefix("module."): p for n, p in model.named_parameters()}
    return losses, {name: whole(p.detach()) for name, p in named.items()}


def whole(x):
    return x.full_tensor() if isinstance(x, DTensor) else x


def model_of(attend, dtype=torch.float64, **options):
    torch.manual_seed(0)
    return Model(attend, **options).to(dtype)


def same(found, expected):
    """Parameters after the same steps."""
    for x, y in zip(found.values(), expected.values(), strict=True):
        torch.testing.assert_close(x, y)


def similar(found, expected, before):
    """Steps in bfloat16, whose roundings differ with the size of a matrix product."""

    def steps(model, since):
        return torch.cat(
            [(x - y).flatten() for x, y in zip(model.values(), since.values(), strict=True)]
        )

    assert steps(found, expected).norm() < 0.02 * steps(expected, before).norm()


# What each layer of a block does to be divided by heads, and by columns of the feed-forward layer.
LOCAL = {
    **{f"attention.{name}": ColwiseParallel() for name in ("query", "key", "value")},
    "attention.output": RowwiseParallel(),
    "up": ColwiseParallel(),
    "down": RowwiseParallel(),
}
# The same, with DTensors between the layers, so that attention meets them.
DTENSORS = LOCAL | {
    f"attention.{name}": ColwiseParallel(use_local_output=False)
    for name in ("query", "key", "value")
}
# Keys and values are there as a whole: for fewer of their heads than processes.
REPLICATED_KEYS = DTENSORS | {
    f"attention.{name}": ColwiseParallel(output_layouts=Replicate(), use_local_output=False)
    for name in ("key", "value")
}
# Between attention and the feed-forward layer, each process has a part of the sequence.
SEQUENCE = DTENSORS | {
    **{f"norms.{n}": SequenceParallel() for n in range(2)},
    "": PrepareModuleInput(input_layouts=(Replicate(),), desired_input_layouts=(Shard(1),)),
    "attention": PrepareModuleInput(
        input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)
    ),
    "attention.output": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
    "up": ColwiseParallel(input_layouts=Shard(1)),
    "down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
}
PLANS = {"local": LOCAL, "dtensors": DTENSORS, "keys": REPLICATED_KEYS, "sequence": SEQUENCE}
ATTEND = {"qkv": by_qkv, "sdpa": by_sdpa}


class TestTensorParallel:
    @pytest.mark.parametrize("attend", ATTEND)
    @pytest.mark.parametrize("plan", ["local", "dtensors", "sequence"])
    def test_agrees(self, plan, attend):
        run(2, plan_agrees, plan, attend, 4)

    @pytest.mark.parametrize("kv_heads", [1, 2])
    def test_fewer_key_heads_than_processes(self, kv_heads):
        run(4, plan_agrees, "keys", "qkv", kv_heads)


def plan_agrees(plan, attend, kv_heads):
    model = model_of(ATTEND[attend], kv_heads=kv_heads)
    expected_losses, expected = train(copy.deepcopy(model))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        parallelize_module(block, mesh, PLANS[plan])
    losses, found = train(model)
    same(found, expected)
    torch.testing.assert_close([whole(x) for x in losses], expected_losses)


class TestDataParallel:
    @pytest.mark.parametrize("autocast", [False, True])
    @pytest.mark.parametrize("wrap", ["ddp", "fsdp"])
    def test_agrees(self, wrap, autocast):
        run(2, data_parallel_agrees, wrap, autocast)

    def test_with_tensor_parallel(self):
        run(4, both_agree)

    @pytest.mark.bf16
    def test_fsdp_in_bfloat16(self):
        run(2, fsdp_in_bfloat16)


def ddp(model):
    return DistributedDataParallel(model)


def fsdp(model, **options):
    options.setdefault("mesh", init_device_mesh("cpu", (dist.get_world_size(),)))
    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def own_part():
    items = BATCH // dist.get_world_size()
    return slice(dist.get_rank() * items, (dist.get_rank() + 1) * items)


def data_parallel_agrees(wrap, autocast):
    dtype = torch.float32 if autocast else torch.float64
    model = model_of(by_qkv, dtype, checkpoints=True)
    before = copy.deepcopy(dict(model.named_parameters()))
    _, expected = train(copy.deepcopy(model), autocast=autocast)
    _, found = train({"ddp": ddp, "fsdp": fsdp}[wrap](model), own_part(), autocast)
    if autocast:
        similar(found, expected, before)
    else:
        same(found, expected)


def both_agree():
    model = model_of(by_qkv, checkpoints=True)
    _, expected = train(copy.deepcopy(model))
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "heads"))
    for block in model.blocks:
        parallelize_module(block, mesh["heads"], DTENSORS)
    items = BATCH // 2
    first = mesh["data"].get_local_rank() * items
    _, found = train(fsdp(model, mesh=mesh["data"]), slice(first, first + items))
    same(found, expected)


def fsdp_in_bfloat16():
    """Parameters are gathered in bfloat16, so that attention gets that."""
    model = model_of(by_qkv, torch.float32)
    before = copy.deepcopy(dict(model.named_parameters()))
    _, expected = train(copy.deepcopy(model))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    _, found = train(fsdp(model, mp_policy=policy), own_part())
    similar(found, expected, before)
