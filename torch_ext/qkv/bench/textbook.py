"""Attention with every option as a textbook has it: what is checked against (in float64, in blocks,
without the memory that all scores would take) and, in one piece, one of torch's ways."""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from .philox import kept

SEQUENCES = ("query", "key", "value")
BLOCK_ELEMENTS = 1 << 22  # of a block of scores in float64: 32 MiB


@dataclass(frozen=True)
class Block:
    """Some queries and some keys, from some item of the batch on; offset is S - L of the whole."""

    rows: range
    keys: range
    offset: int = 0
    first_item: int = 0

    def distance(self):
        """|i + S - L - j|, int64 [rows, keys]"""
        i, j = torch.arange(self.rows.start, self.rows.stop), torch.arange(*self._keys)
        return (i[:, None] + self.offset - j).abs()

    def visible(self, is_causal=False, window_size=None):
        """Bool [rows, keys], or None if positions hide nothing. is_causal is top-left aligned, the
        window bottom-right."""
        i, j = torch.arange(self.rows.start, self.rows.stop)[:, None], torch.arange(*self._keys)
        parts = [j <= i] if is_causal else []
        left, right = window_size or (-1, -1)
        parts += [i + self.offset - left <= j] if left >= 0 else []
        parts += [j <= i + self.offset + right] if right >= 0 else []
        return torch.stack(torch.broadcast_tensors(*parts)).all(0) if parts else None

    def kept(self, seed, dropout_p, batch, heads):
        """Bool [batch, heads, rows, keys]"""
        planes = range(self.first_item * heads, (self.first_item + batch) * heads)
        found = kept(seed, dropout_p, planes, self.rows, self.keys)
        return found.view(batch, heads, *found.shape[1:])

    @property
    def _keys(self):
        return self.keys.start, self.keys.stop


def attend(
    query, key, value, *, attn_mask=None, dropout_p=0.0, is_causal=False, enable_gqa=False,
    window_size=None, softcap=0.0, alibi_slopes=None, sinks=None, block=None, seed=None,
):  # fmt: skip
    """qkv.attention by torch's operators, in the inputs' dtype. query [B, H, L, D],
    key [B, Hkv, S, D], value [B, Hkv, S, Dv], the rest as qkv.attention takes it; every query must
    see a key. block: which part of a larger problem this is. seed: what qkv drew, or
    None: torch draws."""
    L, S = query.size(-2), key.size(-2)
    block = block or Block(range(L), range(S), S - L)
    by_kv_head = (query.size(0), key.size(1), -1)  # the rows of a group of heads below each other
    query = query * query.size(-1) ** -0.5
    scores = (query.reshape(*by_kv_head, query.size(-1)) @ key.mT).view(*query.shape[:-1], S)
    if softcap:
        scores = (scores / softcap).tanh() * softcap
    if alibi_slopes is not None:
        scores = scores - alibi_slopes[..., None, None] * block.distance()
    if attn_mask is not None and attn_mask.dtype != torch.bool:
        scores = scores + attn_mask
    elif attn_mask is not None:
        scores = scores.masked_fill(~attn_mask, -math.inf)
    visible = block.visible(is_causal, window_size)
    if visible is not None:
        scores = scores.masked_fill(~visible, -math.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks[..., None, None].expand(*scores.shape[:-1], 1)], -1)
    weights = scores.softmax(-1)[..., :S]
    if dropout_p and seed is None:
        weights = F.dropout(weights, dropout_p)
    elif dropout_p:
        weights = weights * block.kept(seed, dropout_p, *weights.shape[:2]) / (1 - dropout_p)
    output = weights.reshape(*by_kv_head, S) @ value
    return output.view(*query.shape[:-1], value.size(-1))


def answers(case, dtype=torch.float64, seed=None):
    """{"output", "grad_query", "grad_key", ...}: what case's call returns, and the gradients of all
    leaves, computed in `dtype`, the blocks' added up in float64. seed: of dropout."""
    inputs = {
        name: x.detach().to(dtype) if isinstance(x, torch.Tensor) and x.is_floating_point() else x
        for name, x in case.inputs.items()
    }
    grad_output = case.grad_output.to(dtype)
    output = torch.empty_like(grad_output)
    grads = {name: torch.zeros_like(inputs[name], dtype=torch.float64) for name in case.leaves}
    taken = {*SEQUENCES, *attend.__kwdefaults__}
    fixed = {name: x for name, x in inputs.items() if name in taken.difference(grads)}
    for first_item, part in parts(case):
        for block in blocks(case, first_item, part(inputs["query"]), part(inputs["key"])):

            def view(name, x, part=part, block=block):
                return cut(name, part(x) if name in SEQUENCES else x, block)

            leaves = {name: view(name, inputs[name]).detach().requires_grad_() for name in grads}
            others = {name: view(name, x) for name, x in fixed.items()}
            found = attend(**leaves, **others, block=block, seed=seed)
            view("query", output).copy_(found.detach())
            if not leaves:
                continue
            found = torch.autograd.grad(found, leaves.values(), view("query", grad_output))
            for name, grad in zip(leaves, found, strict=True):
                view(name, grads[name]).add_(grad)
    return {"output": output} | {f"grad_{name}": grad.to(dtype) for name, grad in grads.items()}


def parts(case):
    """(index of the first batch item, function from a tensor to its part [B, H, L, D]): a few batch
    items where they are small, one document of a packed batch."""
    if case.documents:
        for begin, end in case.documents:
            yield 0, lambda x, begin=begin, end=end: x[begin:end].transpose(0, 1)[None]
        return
    shape = case.entry.shape
    item = max(shape.heads * shape.seqlen_q, shape.kv_heads * shape.head_dim) * shape.seqlen_k
    step = max(1, BLOCK_ELEMENTS // item)
    for start in range(0, shape.batch, step):
        yield start, lambda x, start=start: x[start : start + step]


def blocks(case, first_item, query, key):
    """Few queries at a time, and the keys that a window lets them see."""
    L, S = query.size(-2), key.size(-2)
    left, right = case.inputs.get("window_size") or (-1, -1)
    width = min(S, left + 1 + right) if min(left, right) >= 0 else S
    step = max(1, BLOCK_ELEMENTS // (query.size(0) * query.size(1) * width))
    for start in range(0, L, step):
        rows = range(start, min(start + step, L))
        first = max(0, rows.start + S - L - left) if left >= 0 else 0
        last = min(S, rows.stop + S - L + right) if right >= 0 else S
        yield Block(rows, range(first, last), S - L, first_item)


def cut(name, x, block):
    """The view of x that the block needs."""
    rows, keys = (slice(r.start, r.stop) for r in (block.rows, block.keys))
    if name == "query":
        return x[..., rows, :]
    if name in ("key", "value"):
        return x[..., keys, :]
    if name == "attn_mask":  # broadcasts where its size is 1
        rows = rows if x.size(-2) > 1 else slice(None)
        return x[..., rows, keys if x.size(-1) > 1 else slice(None)]
    return x
