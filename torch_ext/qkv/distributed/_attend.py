"""Which ranks compute what of a call, and the call itself."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from qkv.distributed._block import OPTION_TENSORS, Options
from qkv.distributed._call import Call, why_not_by_heads
from qkv.distributed._heads import option_heads, own_heads, own_rows
from qkv.distributed._passes import Ring, RingAttention
from qkv.distributed._plan import Plan
from qkv.distributed._ranks import ALONE, Team
from qkv.options import BY_HEAD, MASKS

_forward = torch.ops.qkv.attention_forward.default


def resolved(call: Call, lead: tuple[int, ...], team: Team) -> Team:
    """The team as the call's method wants it: a ring of all ranks, or all of them over heads.

    auto divides the heads where it can: key and value then travel once, and each rank makes one
    call for the whole sequence, where around a ring they go to every rank and each makes a call or
    more for every other. Masks stay where they are in a ring, and have to travel with the rows.
    """
    if team.heads.size > 1 or call.method == "ring":
        return team
    has_rows = any(mask.dim() > 1 and mask.size(-2) > 1 for mask in call.masks)
    if call.method == "auto":
        if has_rows or why_not_by_heads(call, lead, team.size) is not None:
            return team
    return Team(heads=team.ring, ring=ALONE)


def attend(
    call: Call, lead: tuple[int, ...], seed: Tensor | None, team: Team
) -> tuple[Tensor, Tensor]:
    """Output and lse of this rank's rows. lead: `[..., H]` of the output."""
    inputs, tensors, ranks = (call.query, call.key, call.value), call.tensors, team.heads
    if ranks.size > 1:
        inputs = tuple(own_heads(x, ranks) for x in inputs)
        tensors = {name: option_heads(name, x, ranks) for name, x in tensors.items()}
    of_options = dict.fromkeys((*MASKS, *BY_HEAD)) | tensors
    heads = lead[-1] if lead else 1
    own = heads // ranks.size
    # A packed call has no masks. A ring has, of documents too, also one of a single rank.
    if team.ring.size == 1 and not (call.cu_seqlens is not None and call.masks):
        shard = [0, 0, 0, 0, ranks.rank * own, heads, 0] if ranks.size > 1 else None
        output, lse = _attend_whole(inputs, of_options, call, seed, shard)
    else:
        documents = None if call.cu_seqlens is None else call.cu_seqlens.numel() - 1
        scalars = {name: x for name, x in call.scalars.items() if name != "is_causal"}
        options = Options({}, scalars, own, heads, ranks.rank * own, documents, seed)
        plan = _plan(call, team.ring.size, inputs[0].size(-2) // 2)
        ring = Ring(team.ring, plan, (*lead[:-1], own) if lead else (), options)
        output, lse = RingAttention.apply(*inputs, *of_options.values(), ring)
        output = output.to(call.query.dtype)
    if ranks.size > 1:
        output, lse = own_rows(output, ranks), own_rows(lse.unsqueeze(-1), ranks).squeeze(-1)
    return output, lse


def _plan(call: Call, size: int, chunk: int) -> Plan:
    left, right = call.scalars["window_size"] or (-1, -1)
    is_windowed = left >= 0 or right >= 0
    is_placed = is_windowed or call.scalars["dropout_p"] > 0 or call.cu_seqlens is not None
    return Plan(
        size=size,
        chunk=chunk,
        seqlen=call.seqlen,
        is_causal=call.scalars["is_causal"],
        window=(left, right),
        positions=is_placed or bool(call.tensors.keys() & OPTION_TENSORS.keys()),
        ends=None if call.cu_seqlens is None else tuple(call.cu_seqlens.tolist()),
        may_pack=not call.masks,
    )


def _attend_whole(
    inputs: tuple[Tensor, ...],
    tensors: dict[str, Tensor | None],
    call: Call,
    seed: Tensor | None,
    shard: list[int] | None,
) -> tuple[Tensor, Tensor]:
    """By one call, where all rows are here in their own order. What pads them is left out, and back
    again in the results."""
    rows, seqlen = inputs[0].size(-2), call.seqlen
    inputs = tuple(x.narrow(-2, 0, seqlen) for x in inputs)
    for name in MASKS:
        mask = tensors[name]
        if mask is not None and mask.dim() > 1 and mask.size(-2) > 1:
            tensors[name] = mask.narrow(-2, 0, seqlen)
    ends = call.cu_seqlens
    if ends is not None:
        inputs = tuple(x.transpose(0, 1) for x in inputs)
    output, lse = _forward(
        *inputs, **tensors, dropout_seed=seed, cu_seq_q=ends, cu_seq_k=ends, seqused_k=None,
        shard=shard, **call.scalars,
    )  # fmt: skip
    if ends is not None:
        output = output.transpose(0, 1)
    padding = rows - seqlen
    return F.pad(output, (0, 0, 0, padding)), F.pad(lse, (0, padding), value=-math.inf)
