"""Attention over a sequence that is cut over ranks."""

import operator
from collections.abc import Callable
from typing import Any, Literal, overload

import torch
from torch import Tensor

from qkv._machine import is_reproducible
from qkv._refuse import refuse
from qkv.distributed._agree import Facts, agree, eager, told
from qkv.distributed._attend import attend, resolved
from qkv.distributed._call import Call, check, prepare
from qkv.distributed._ranks import Group, team_of
from qkv.options import ScoreOptions, Unpack
from qkv.spans import Spans

Method = Literal["ring", "heads", "auto"]
_dropout_seed = torch.ops.qkv.dropout_seed.default


@overload
def ring_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None,
    dropout_p: float = 0.0, is_causal: bool = False, *,
    return_lse: Literal[False] = False, seqlen: int | None = None, cu_seqlens: Tensor | None = None,
    dropout_seed: int | Tensor | None = None, method: Method = "ring", group: Group = None,
    score_mod: Callable[..., Any] | None = None, **options: Unpack[ScoreOptions],
) -> Tensor: ...  # fmt: skip
@overload
def ring_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None,
    dropout_p: float = 0.0, is_causal: bool = False, *,
    return_lse: Literal[True], seqlen: int | None = None, cu_seqlens: Tensor | None = None,
    dropout_seed: int | Tensor | None = None, method: Method = "ring", group: Group = None,
    score_mod: Callable[..., Any] | None = None, **options: Unpack[ScoreOptions],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def ring_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None,
    dropout_p: float = 0.0, is_causal: bool = False, *,
    return_lse: bool, seqlen: int | None = None, cu_seqlens: Tensor | None = None,
    dropout_seed: int | Tensor | None = None, method: Method = "ring", group: Group = None,
    score_mod: Callable[..., Any] | None = None, **options: Unpack[ScoreOptions],
) -> Tensor | tuple[Tensor, Tensor]: ...  # fmt: skip
def ring_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None,
    dropout_p: float = 0.0, is_causal: bool = False, *,
    scale: float | None = None, enable_gqa: bool = False,
    window_size: tuple[int, int] | None = None, softcap: float = 0.0,
    alibi_slopes: Tensor | None = None, bias: Tensor | None = None,
    spans: Spans | Tensor | None = None, sinks: Tensor | None = None,
    return_lse: bool = False, seqlen: int | None = None, cu_seqlens: Tensor | None = None,
    dropout_seed: int | Tensor | None = None, method: Method = "ring", group: Group = None,
    score_mod: Callable[..., Any] | None = None,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """`qkv.attention` over a sequence of which each rank of a process group has a shard.

    Everything means what it means in one call over the whole sequence, of N positions. All ranks
    call it, with the same arguments but for the tensors' contents.

    Args:
        query: `[..., H, L_local, D]`: this rank's shard, as `shard` cuts it: of the 2n chunks of
            the sequence, on n ranks, numbers r and 2n - 1 - r. float32, float64, bfloat16 or
            float16, on the CPU.
        key: `[..., H, L_local, D]`, of query's dtype: the same shard of keys.
        value: `[..., H, L_local, Dv]`, of query's dtype.
        attn_mask: broadcastable to `[..., H, L_local, N]`: the rows are this rank's, in the order
            of its shard, or one for all; the columns are those of the whole sequence in its own
            order. So is bias, of packed documents too; spans have such rows, and keys of the whole
            sequence. alibi_slopes and sinks are the same on all ranks.
        dropout_p: as in `qkv.attention`: which weights are dropped does not depend on the number of
            ranks.
        is_causal: each query sees the keys up to its own position.
        scale, enable_gqa, window_size, softcap, alibi_slopes, bias, spans, sinks, return_lse: as in
            `qkv.attention`.
        seqlen: N, where shards are padded; `n * L_local` if None. What is padded is hidden, its
            output is 0, and it gets no gradient.
        cu_seqlens: `[documents + 1]`, int32 or int64, the same on all ranks: where each of several
            packed documents begins in the sequence, and where the last one ends, as in
            `qkv.varlen_attn`. Each attends to itself alone. query is `[H, L_local, D]` or
            `[1, H, L_local, D]`; alibi_slopes and sinks are `[H]` or `[documents, H]`.
        dropout_seed: 64 bits that say which weights are dropped, the same on all ranks. If None,
            the first rank's default generator draws them.
        method: "ring": key and value of each rank go to every other, while that one computes.
            "heads": each rank gets all rows of some heads, so that n must divide H, and divide the
            heads of key and value or be divided by them. "auto": docs/distributed.md says which.
        group: a process group or a mesh of one dimension; the default group if None. A mesh of two
            dimensions, (heads, ring), does both: the sequence is cut over all of its ranks; the
            heads over the first dimension, and what the ranks of that have of the sequence together
            goes around the second.
        score_mod: as in `qkv.flex_attention`, by positions in the sequence, or in its documents,
            which are its batch items. The same on all ranks.

    Returns:
        `[..., H, L_local, Dv]` in query's dtype; with return_lse also `[..., H, L_local]`, float64
        for float64, else float32.

        Differentiable by backward, which all ranks have to call, with respect to query, key,
        value, a floating attn_mask, bias, alibi_slopes, sinks and what score_mod captures.
        Gradients are those of the sum of all ranks' losses. Those of query, key and value are
        complete; those of all others are the share of this rank's rows (over heads: of its heads),
        which is to be summed over the ranks, as DDP does with all parameters. Over heads, or on one
        rank, there are second derivatives and forward mode too, but of packed documents with masks.

    Raises:
        RuntimeError: on every rank: an argument that does not fit or is not the same on all ranks,
            by its name; a rank that failed, and in which step this one noticed, after the group's
            timeout at the latest.
        NotImplementedError: a second derivative or forward mode over a ring, or of packed documents
            with masks.

    Example (on each of two ranks):
        >>> dist.init_process_group("gloo")
        >>> whole = torch.randn(3, 1, 8, 1000, 64, generator=torch.Generator().manual_seed(0))
        >>> query, key, value = qkv.distributed.shard(whole, dim=-2)  # 500 rows each
        >>> output = qkv.distributed.ring_attention(query, key, value, is_causal=True)
        >>> output = qkv.distributed.unshard(output, dim=-2)
        >>> output.allclose(qkv.attention(*whole, is_causal=True), atol=1e-5)
        True

    Sources: Liu, Zaharia and Abbeel, "Ring attention with blockwise transformers", 2023; the order
    of the chunks, Zhu, ring-flash-attention, 2024, and Dubey et al., "The Llama 3 herd of models",
    2024; heads, Jacobs et al., "DeepSpeed Ulysses", 2023; both, Fang and Zhao, "USP", 2024.
    """
    inputs = {"query": query, "key": key, "value": value}
    call = Call(
        inputs, seqlen, cu_seqlens, method, score_mod,
        attn_mask=attn_mask, bias=bias, spans=spans, alibi_slopes=alibi_slopes, sinks=sinks,
        dropout_p=dropout_p, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa,
        window_size=window_size, softcap=softcap,
    )  # fmt: skip
    output, lse = eager(_attend)(call, dropout_seed, group)
    if cu_seqlens is not None and query.dim() == 4:
        output, lse = output[None], lse[None]
    return (output, lse) if return_lse else output


def _attend(call: Call, dropout_seed: int | Tensor | None, group: Group) -> tuple[Tensor, Tensor]:
    """Output and lse of this rank's rows, once all ranks make the same call."""
    team = team_of("ring_attention", group)
    facts: Facts = {"function": "ring_attention", "reproducible": is_reproducible()}
    number, failure = 0, None
    try:
        prepare(call)
        check(call, team)
        if call.scalars["dropout_p"] > 0:
            own = _dropout_seed(call.inputs["query"]) if dropout_seed is None else dropout_seed
            number = _seed_of(own)
            facts["dropout_seed"] = None if dropout_seed is None else number
        facts |= {n: told(x) for n, x in (call.inputs | call.tensors).items()}
        facts |= {**call.scalars, "seqlen": call.seqlen, "method": call.method}
        facts["cu_seqlens"] = None if call.cu_seqlens is None else call.cu_seqlens.tolist()
    except Exception as error:  # of any kind: score_mod is the caller's
        failure = error
    number, team = agree(facts, team, number, failure)
    seed = torch.tensor([number]) if call.scalars["dropout_p"] > 0 else None
    return attend(call, seed, resolved(call, team))


def _seed_of(given: int | Tensor) -> int:
    """The 64 bits as a signed number."""
    try:
        number = operator.index(given)
    except TypeError:
        number = 2**64
    if not -(2**63) <= number < 2**64:
        wanted = "an int of 64 bits, or a tensor of one, is expected"
        refuse("dropout_seed", repr(given), wanted, TypeError)
    return (number + 2**63) % 2**64 - 2**63
