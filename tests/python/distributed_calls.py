"""Calls of attention over a whole sequence, computed by one process and by many."""

import dataclasses
import functools
import math

import torch
from rounding import assert_within_rounding, magnitudes
from torch.distributed.device_mesh import init_device_mesh

import qkv.distributed
from qkv._score_function.arguments import keywords_of_program
from qkv.distributed._shards import natural

INPUTS = ("query", "key", "value")
HIDDEN = 0.2  # of a mask
_forward = torch.ops.qkv.attention_forward


@dataclasses.dataclass(frozen=True)
class Whole:
    """A recipe for tensors and options.

    masks: {"attn_mask", "bias" or "spans": shape}, where "N" is the length; is_bool: attn_mask is
    bool.
    per_head: {"alibi_slopes" or "sinks": shape}. function: there is a score_mod, which reads the
    tensor `table`. lengths: of packed documents, after `gap` rows
    that are in none. scalars: the other options of ring_attention.
    """

    seqlen: int = 50
    batch: tuple = (2,)
    heads: int = 4
    kv_heads: int = 4
    head_dims: tuple = (8, 8)
    dtype: torch.dtype = torch.float64
    masks: dict = dataclasses.field(default_factory=dict)
    is_bool: bool = False
    per_head: dict = dataclasses.field(default_factory=dict)
    function: bool = False
    lengths: tuple | None = None
    gap: int = 0
    scalars: dict = dataclasses.field(default_factory=dict)
    seed: int = 0

    def __repr__(self):  # what differs from the defaults is the name of a test
        fields = dataclasses.fields(self)
        given = [(f.name, getattr(self, f.name)) for f in fields]
        usual = Whole()
        return "-".join(f"{n}={x}" for n, x in given if x != getattr(usual, n)) or "plain"

    def tensors(self):
        """The inputs and the options that are tensors, and gradients of output and lse, by name."""
        generator = torch.Generator().manual_seed(self.seed)

        def randn(*shape, dtype=self.dtype):
            x = torch.randn(shape, generator=generator, dtype=torch.float64)
            return x.to(dtype)

        (D, Dv), N = self.head_dims, self.seqlen
        kv = (*self.batch, self.kv_heads, N)
        found = {
            "query": randn(*self.batch, self.heads, N, D), "key": randn(*kv, D),
            "value": randn(*kv, Dv),
        }  # fmt: skip
        wide = torch.float64 if self.dtype == torch.float64 else torch.float32
        for name, shape in self.masks.items():
            mask = randn(*(N if n == "N" else n for n in shape), dtype=wide)
            if name == "attn_mask":
                hidden = torch.rand(mask.shape, generator=generator) < HIDDEN
                mask = ~hidden if self.is_bool else mask.masked_fill(hidden, -math.inf)
            if name == "spans":  # of any keys, the earlier one first
                mask = mask.abs().mul(N / 2).clamp(max=N).unflatten(-1, (-1, 2)).sort(-1).values
                mask = mask.flatten(-2).int()
            found[name] = mask
        for name, shape in self.per_head.items():
            found[name] = randn(*shape, dtype=wide)
        if self.function:
            found["table"] = randn(self.heads, 9, dtype=wide)
        grads = {
            "grad_output": randn(*self.batch, self.heads, N, Dv),
            "grad_lse": randn(*self.batch, self.heads, N, dtype=wide),
        }
        return found, grads

    @property
    def ends(self):
        """cu_seqlens, or None."""
        if self.lengths is None:
            return None
        return torch.tensor([self.gap, *self.lengths]).cumsum(0)

    def options(self):
        """All that is no tensor with a gradient."""
        enable_gqa = {"enable_gqa": True} if self.heads != self.kv_heads else {}
        return {**self.scalars, **enable_gqa}


def score_mod_of(table):
    return lambda s, b, h, q, k: s + table[h, (q - k) % 9] * (1 + b % 3)


def leaves_of(tensors):
    return {n: x.requires_grad_() if x.is_floating_point() else x for n, x in tensors.items()}


def results_of(leaves, output, lse, grads):
    """output, lse and the gradients of the leaves, by name."""
    torch.autograd.backward([output, lse], [grads["grad_output"], grads["grad_lse"]])
    found = {"output": output.detach(), "lse": lse.detach()}
    for name, x in leaves.items():
        if x.requires_grad:
            found[f"grad_{name}"] = torch.zeros_like(x) if x.grad is None else x.grad
    return found


def by_one(whole, dtype=None):
    """The results of one process; of documents, by a call for each. dtype: what is computed in."""
    tensors, grads = whole.tensors()
    tensors = leaves_of(tensors)
    cast = {n: x.to(dtype) if dtype and x.is_floating_point() else x for n, x in tensors.items()}
    if whole.ends is None:
        output, lse = _attend(cast, whole, 0)
    else:
        output, lse = _attend_documents(cast, whole)
    if dtype:
        grads = {n: x.to(dtype) for n, x in grads.items()}
    return results_of(tensors, output, lse, grads)


def _attend(tensors, whole, document):
    options = {
        "dropout_p": 0.0, "is_causal": False, "scale": None, "enable_gqa": False,
        "window_size": None, "softcap": 0.0,
    } | whole.options()  # fmt: skip
    seed = options.pop("dropout_seed", None)
    given = dict.fromkeys(("attn_mask", "bias", "spans", "alibi_slopes", "sinks")) | tensors
    if whole.function:
        given |= keywords_of_program(score_mod_of(given.pop("table")), given["query"])
    if seed is not None:
        seed = torch.tensor([(seed + 2**63) % 2**64 - 2**63])  # the same 64 bits, signed
    packed = dict.fromkeys(("cu_seq_q", "cu_seq_k", "seqused_k"))
    shard = [0, 0, 0, 0, 0, 0, document]
    return _forward(**given, **packed, dropout_seed=seed, shard=shard, **options)


def _attend_documents(tensors, whole):
    query, value = tensors["query"], tensors["value"]
    nothing = 0 * query.sum()  # there may be no documents, but there is a gradient
    outputs = [nothing.expand(whole.heads, whole.gap, value.size(-1))]
    lses = [nothing.expand(whole.heads, whole.gap) - math.inf]
    ends = whole.ends.tolist()
    for number, (begin, end) in enumerate(zip(ends, ends[1:], strict=False)):
        own = dict(tensors)
        for name in INPUTS:
            own[name] = own[name][..., begin:end, :]
        for name in whole.masks:
            if own[name].size(-2) > 1:
                own[name] = own[name][..., begin:end, :]
            if name == "spans":
                own[name] = (own[name] - begin).clamp(0, end - begin)
            else:
                own[name] = own[name][..., begin:end]
        for name, shape in whole.per_head.items():
            if len(shape) == 2:
                own[name] = own[name][number if shape[0] > 1 else 0]
        output, lse = _attend(own, whole, number)
        outputs.append(output)
        lses.append(lse.to(outputs[0].dtype))
    rest = whole.seqlen - ends[-1]
    outputs.append(outputs[0].new_zeros(whole.heads, rest, value.size(-1)))
    lses.append(lses[0].new_full((whole.heads, rest), -math.inf))
    lse = torch.cat(lses, -1)
    return torch.cat(outputs, -2), lse if query.dtype == torch.float64 else lse.float()


@functools.cache
def mesh_of(shape):
    return init_device_mesh("cpu", shape)


def on_rank(whole, method="ring", mesh_shape=None, **more):
    """The results of one of many ranks: what it has of output, lse and gradients."""
    group = mesh_of(mesh_shape) if mesh_shape else None
    tensors, grads = whole.tensors()
    shard = functools.partial(qkv.distributed.shard, group=group)
    # What is in the padding does not matter.
    local = {n: shard(x, -2, value=math.nan) for n, x in tensors.items() if n in INPUTS}
    for name, x in tensors.items():
        if name in whole.masks:
            x = shard(x, -2, value=True if whole.is_bool else 0) if x.size(-2) > 1 else x.clone()
        local.setdefault(name, x)
    grads = {
        "grad_output": shard(grads["grad_output"], -2, value=math.nan),
        "grad_lse": shard(grads["grad_lse"], -1, value=math.nan),
    }
    local = leaves_of(local)
    call = {n: x for n, x in local.items() if n != "table"}
    if whole.function:
        call["score_mod"] = score_mod_of(local["table"])
    output, lse = qkv.distributed.ring_attention(
        **call, **whole.options(), **more, return_lse=True, seqlen=whole.seqlen,
        cu_seqlens=whole.ends, method=method, group=group,
    )  # fmt: skip
    return results_of(local, output, lse, grads)


def together(whole, of_ranks, mesh_shape=None):
    """The results of all ranks, put together; checks that what pads them is 0."""
    if mesh_shape:  # the rank's number in the mesh is not that of its shard
        numbers = torch.arange(len(of_ranks)).view(mesh_shape).T.flatten()
        of_ranks = [of_ranks[n] for n in numbers]
    found = {}
    for name, first in of_ranks[0].items():
        parts = [results[name] for results in of_ranks]
        argument = name.removeprefix("grad_")
        is_mask = argument in whole.masks
        if argument in (*whole.per_head, "table") or is_mask and first.size(-2) == 1:
            found[name] = sum(parts)
            continue
        dim = -1 if name == "lse" else -2
        x = natural(parts, dim)
        padding = x.narrow(dim, whole.seqlen, x.size(dim) - whole.seqlen)
        assert (padding == (-math.inf if name == "lse" else 0)).all(), name
        found[name] = x.narrow(dim, 0, whole.seqlen)
    return found


def assert_same(whole, found, expected=None):
    """The results are those of one process: f64 to 1e-12; others no further from the truth, but for
    a few roundings of the sums that they are made of (rounding.py)."""
    expected = expected or by_one(whole)
    assert found.keys() == expected.keys()
    if whole.dtype == torch.float64:
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    else:
        assert_rounded(whole, found, expected)


def assert_rounded(whole, found, expected):
    tensors, grads = whole.tensors()
    options = whole.options() | {n: x for n, x in tensors.items() if n not in INPUTS}
    inputs = [tensors[name] for name in INPUTS]
    sizes = magnitudes(*inputs, **options, grads=(grads["grad_output"], grads["grad_lse"]))
    truth = by_one(whole, torch.float64)
    for name, x in found.items():
        assert x.dtype == expected[name].dtype
        size = sizes[name.removeprefix("grad_")]
        assert_within_rounding(x, expected[name], truth[name], size, whole.dtype)
