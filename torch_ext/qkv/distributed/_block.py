"""Attention of some queries to some keys of a sequence, by the operators that know where in the
whole a call stands."""

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from qkv.distributed._plan import Block, Plan, Range
from qkv.distributed._ranks import Ranks
from qkv.distributed._transport import wide
from qkv.options import BY_HEAD, DIFFERENTIABLE, MASKS, TABLES

_forward = torch.ops.qkv.attention_forward.default
_backward = torch.ops.qkv.attention_backward.default
OPTION_TENSORS = (*MASKS, *BY_HEAD, *TABLES)  # those beside query, key and value
# Which dimension of a tensor is its heads, where it is not `[..., H, L, D]`.
_HEADS = dict.fromkeys(BY_HEAD, -1) | {"lse": -2, "grad_lse": -2}


@dataclass(frozen=True)
class Ring:
    """What a call is beside query, key and value, of some of its `heads` heads, from first_head on.

    lead: `[..., H]` of the output, of these heads. scalars: dropout_p, scale, enable_gqa,
    window_size, softcap and score_program; is_causal is what the block says. tensors: attn_mask and
    bias, `[..., H, L_local or 1, N or 1]`, with rows as on this rank and columns as in the sequence
    of length N; spans, with such rows, of keys of that sequence; alibi_slopes and sinks `[..., H]`,
    or one row for each packed document; the tables of a score program.
    """

    ranks: Ranks
    plan: Plan
    lead: tuple[int, ...]
    scalars: dict[str, Any]
    heads: int
    first_head: int = 0
    dropout_seed: Tensor | None = None  # int64 [1]
    tensors: dict[str, Tensor] = field(default_factory=dict)

    def of_heads(self, part: int, parts: int) -> "Ring":
        """The same for one of so many equal parts of the heads."""
        lead = (*self.lead[:-1], self.lead[-1] // parts) if self.lead else ()
        first_head = self.first_head + part * (lead or (1,))[-1]
        tensors = tensors_of_heads(self.tensors, part, parts)
        return replace(self, lead=lead, first_head=first_head, tensors=tensors)


def tensors_of_heads(tensors: dict[str, Tensor], part: int, parts: int) -> dict[str, Tensor]:
    """Views of one of so many equal parts of the heads, of tensors by these names."""
    return {name: heads_of(name, x, part, parts) for name, x in tensors.items()}


def heads_of(name: str, tensor: Tensor, part: int, parts: int) -> Tensor:
    """A view of one of so many equal parts of the heads: the tensor itself where it has one for
    all."""
    dim = _HEADS.get(name, -3)
    if tensor.dim() < -dim or tensor.size(dim) == 1:
        return tensor
    heads = tensor.size(dim) // parts
    return tensor.narrow(dim, part * heads, heads)


def has_rows(mask: Tensor) -> bool:
    """Whether it has one for each query, and not one for all."""
    return mask.dim() > 1 and mask.size(-2) > 1


def rows_of(tensor: Tensor, rows: Range, dim: int = -2) -> Tensor:
    """A view of these rows of `[..., L, D]`, or with -1 for dim of `[..., L]`."""
    return tensor.narrow(dim, rows.begin, rows.size)


def _part(name: str, tensor: Tensor, block: Block, ring: Ring) -> Tensor:
    """A view of what a tensor of the options has for a block; of spans, what they show of it."""
    if name in TABLES:
        return tensor
    if name in BY_HEAD:
        if ring.plan.ends is None or tensor.dim() < 2:
            return tensor
        if tensor.size(0) == 1:
            return tensor[0]
        if block.ends is None:
            return tensor[block.document]
        return tensor.narrow(0, block.document, len(block.ends) - 1)
    if has_rows(tensor):
        tensor = rows_of(tensor, block.rows)
    if name == "spans":
        return (tensor - block.key_begin).clamp_(0, block.columns.size)
    if tensor.dim() == 0 or tensor.size(-1) == 1:
        return tensor
    return tensor.narrow(-1, block.key_begin, block.columns.size)


def _is_in(name: str, block: Block) -> bool:
    """Whether a tensor of the options has a part in a block."""
    return name != "sinks" or block.has_sinks


def _arguments(block: Block, ring: Ring) -> dict:
    """What a call for the block has besides query, key, value and results. A packed one has the
    documents as they are, with positions of their own."""
    ends = None if block.ends is None else torch.tensor(block.ends)
    offsets = block.query_begin - block.origin, block.key_begin - block.origin
    heads = ring.first_head, ring.heads
    parts = {n: _part(n, x, block, ring) for n, x in ring.tensors.items() if _is_in(n, block)}
    # Half precision in float32, as query, key and value are.
    parts = {n: x.to(wide(x.dtype)) if x.is_floating_point() else x for n, x in parts.items()}
    return dict.fromkeys(OPTION_TENSORS) | {
        **parts,
        "cu_seq_q": ends,
        "cu_seq_k": ends,
        "seqused_k": None,
        "dropout_seed": ring.dropout_seed,
        **ring.scalars,
        "is_causal": block.is_causal,
        "shard": [*offsets, block.length, block.length, *heads, block.document],
    }


def _laid_out(block: Block, tensor: Tensor) -> Tensor:
    """`[..., H, L, D]` as the operators take it, or back: of packed documents, `[L, H, D]`."""
    return tensor if block.ends is None else tensor.transpose(0, 1)


def block_forward(
    query: Tensor, key: Tensor, value: Tensor, block: Block, ring: Ring
) -> tuple[Tensor, Tensor]:
    """Output and lse of the block's rows of query, which attend to its columns of key and value, in
    the dtype of the latter."""
    query = rows_of(query, block.rows).to(key.dtype)
    key, value = (rows_of(x, block.columns) for x in (key, value))
    inputs = [_laid_out(block, x) for x in (query, key, value)]
    output, lse = _forward(*inputs, **_arguments(block, ring))
    return _laid_out(block, output), lse


def block_backward(
    queries: dict[str, Tensor], keys: list[Tensor], grads: dict[str, Tensor], block: Block,
    ring: Ring,
) -> None:  # fmt: skip
    """Adds the block's share to gradients: what is not in grads is not wanted.

    Args:
        queries: query, output, lse; and grad_output and grad_lse where there are such. Output and
            lse are those after all keys that a query sees anywhere. All but query are of the dtype
            that is computed in, as keys are.
        keys: key and value.
        grads: by the names of query, of key and value, and of the tensors of the options.
    """
    own = {n: rows_of(x, block.rows, _HEADS.get(n, -3) + 1) for n, x in queries.items()}
    key, value = (_laid_out(block, rows_of(x, block.columns)) for x in keys)
    grad_output = own.get("grad_output")
    if grad_output is not None:
        grad_output = _laid_out(block, grad_output)
    wanted = [n in grads and _is_in(n, block) for n in DIFFERENTIABLE]
    found = _backward(
        grad_output, own.get("grad_lse"), _laid_out(block, own["query"].to(key.dtype)), key, value,
        output=_laid_out(block, own["output"]), logsumexp=own["lse"], output_mask=wanted,
        **_arguments(block, ring),
    )  # fmt: skip
    rows = {"query": block.rows, "key": block.columns, "value": block.columns}
    for name, more, is_wanted in zip(DIFFERENTIABLE, found, wanted, strict=True):
        if is_wanted and name in rows:
            rows_of(grads[name], rows[name]).add_(_laid_out(block, more))
        elif is_wanted:
            _part(name, grads[name], block, ring).add_(more)
