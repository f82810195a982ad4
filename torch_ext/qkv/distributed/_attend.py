"""Which ranks compute what of a call, and the call itself, with all-to-all over heads after Jacobs
et al., "DeepSpeed Ulysses", 2023: from some rows of all heads to all rows of some, and back."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from qkv._machine import is_reproducible
from qkv.distributed._block import OPTION_TENSORS, Ring, tensors_of_heads
from qkv.distributed._call import Call, why_not_by_heads
from qkv.distributed._passes import RingAttention
from qkv.distributed._plan import Plan
from qkv.distributed._ranks import ALONE, Ranks, Team
from qkv.distributed._shards import natural, zigzag
from qkv.distributed._transport import all_to_all, linear

_forward = torch.ops.qkv.attention_forward.default
_DOING = "ring_attention: all-to-all over heads, {}"


def resolved(call: Call, team: Team) -> Team:
    """The team as the call's method wants it: a ring of all ranks, or all of them over heads.

    auto divides the heads where it can: key and value then travel once, and each rank makes one
    call for the whole sequence, where around a ring they go to every rank and each makes a call or
    more for every other. Masks stay where they are in a ring, and have to travel with the rows.
    """
    if team.heads.size > 1 or call.method == "ring":
        return team
    is_ring = call.with_rows or why_not_by_heads(call, team.size) is not None
    return team if call.method == "auto" and is_ring else Team(heads=team.ring, ring=ALONE)


def attend(call: Call, seed: Tensor | None, team: Team) -> tuple[Tensor, Tensor]:
    """Output and lse of this rank's rows."""
    ranks = team.heads
    tensors = _own_heads(call, ranks) if ranks.size > 1 else call.inputs | call.tensors
    # A packed call has no masks. A ring has, of documents too, also one of a single rank.
    if team.ring.size == 1 and not (call.cu_seqlens is not None and call.masks):
        first_head = ranks.rank * (call.heads // ranks.size)
        shard = [0, 0, 0, 0, first_head, call.heads, 0] if ranks.size > 1 else None
        output, lse = _attend_whole(tensors, call, dropout_seed=seed, shard=shard)
    else:
        if team.ring.size > 1 and is_reproducible():
            raise NotImplementedError(
                "ring_attention: what a ring's ranks add up has other bits on other CPUs, but the "
                'same are asked for; expected qkv.set_reproducible(False), or method="heads"'
            )
        plan = _plan(call, team.ring.size, tensors["query"].size(-2) // 2)
        ring = Ring(team.ring, plan, call.lead, call.scalars, call.heads, 0, seed)
        ring = ring.of_heads(ranks.rank, ranks.size)
        names = (*call.inputs, *OPTION_TENSORS)
        output, lse = RingAttention.apply(*map(tensors.get, names), ring)
        output = output.to(tensors["query"].dtype)
    if ranks.size > 1:
        output, lse = linear(_to_rows, _to_heads, output, lse.unsqueeze(-1), ranks=ranks)
        lse = lse.squeeze(-1)
    return output, lse


def _plan(call: Call, size: int, chunk: int) -> Plan:
    window = call.scalars["window_size"] or (-1, -1)
    is_placed = max(window) >= 0 or call.scalars["dropout_p"] > 0 or call.cu_seqlens is not None
    is_placed |= bool(call.scalars["score_program"])
    return Plan(
        size=size,
        chunk=chunk,
        seqlen=call.seqlen,
        is_causal=call.scalars["is_causal"],
        window=window,
        positions=is_placed or bool(call.tensors.keys() - {"sinks"}),
        ends=None if call.cu_seqlens is None else tuple(call.cu_seqlens.tolist()),
        may_pack=not call.masks,
    )


def _attend_whole(tensors: dict[str, Tensor], call: Call, **more: Any) -> tuple[Tensor, Tensor]:
    """By one call, where all rows are here in their own order. What pads them is left out, and back
    again in the results."""
    ends, seqlen, padding = call.cu_seqlens, call.seqlen, tensors["query"].size(-2) - call.seqlen
    given: dict[str, Any] = dict.fromkeys(OPTION_TENSORS) | tensors
    for name in (*call.inputs, *call.with_rows):
        given[name] = tensors[name].narrow(-2, 0, seqlen)
    if ends is not None:
        given |= {name: given[name].transpose(0, 1) for name in call.inputs}
    output, lse = _forward(
        **given, cu_seq_q=ends, cu_seq_k=ends, seqused_k=None, **more, **call.scalars
    )
    if ends is not None:
        output = output.transpose(0, 1)
    return F.pad(output, (0, 0, 0, padding)), F.pad(lse, (0, padding), value=-math.inf)


def _to_heads(tensor: Tensor, ranks: Ranks) -> Tensor:
    """`[..., n * H, L, D]`, in the order of shards, to `[..., H, n * L, D]`, in the order of the
    sequence. Each number goes to one place, so that the way back is the gradient too."""
    parts = tensor.chunk(ranks.size, -3)
    return natural(all_to_all(parts, ranks, _DOING.format("rows to heads")), -2)


def _to_rows(tensor: Tensor, ranks: Ranks) -> Tensor:
    """The way back of _to_heads."""
    parts = zigzag(tensor, -2, ranks.size)
    return torch.cat(all_to_all(parts, ranks, _DOING.format("heads to rows")), -3)


def _own_heads(call: Call, ranks: Ranks) -> dict[str, Tensor]:
    """query, key and value, all rows of this rank's heads, and the tensors of the options that act
    on their scores. Rows of masks come from all ranks, as those of the inputs do."""
    tensors = tensors_of_heads(call.tensors, ranks.rank, ranks.size)
    rows = call.inputs | call.with_rows
    # What is no float has no gradient, and need not be sent back.
    for is_floating in (True, False):
        some = {n: x for n, x in rows.items() if x.is_floating_point() == is_floating}
        sent = (_for_each(x, ranks) for x in some.values())
        tensors |= zip(some, linear(_to_heads, _to_rows, *sent, ranks=ranks), strict=True)
    return tensors


def _for_each(tensor: Tensor, ranks: Ranks) -> Tensor:
    """With a head for every rank: where there are fewer, some get the same."""
    tensor = tensor if tensor.dim() > 2 else tensor[None]
    heads = tensor.size(-3)
    return tensor if heads >= ranks.size else tensor.repeat_interleave(ranks.size // heads, -3)
