"""FlexAttention: torch's function, with the options of `attention`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from qkv._functional import has_kernels
from qkv._refuse import refuse
from qkv._replace_flex import torchs_own
from qkv._verbose import note_left
from qkv.options import FlexOptions, Unpack, keywords_of

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import AuxRequest, BlockMask

_attention = torch.ops.qkv.attention.default
_attention_with_lse = torch.ops.qkv.attention_with_lse.default
_hard_attention = torch.ops.qkv.hard_attention.default
_keywords = keywords_of(_attention, after="value")
_refuse = functools.partial(refuse, function="flex_attention")


def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable[..., Tensor] | None = None,
    block_mask: BlockMask | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: dict[str, Any] | None = None,
    *,
    return_aux: AuxRequest | None = None,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **options: Unpack[FlexOptions],
) -> Any:
    """`torch.nn.attention.flex_attention.flex_attention` on a CPU, for training as well: attention
    whose scores go through a function of one's own. Nothing is compiled: `score_mod` is called
    once, to see what it does. docs/recipes.md says what it may do and what becomes of it.

    Args:
        query: `[B, H, L, D]`, float32, float64, bfloat16 or float16.
        key: `[B, Hkv, S, D]`, of query's dtype.
        value: `[B, Hkv, S, Dv]`, of query's dtype.
        score_mod: of score, batch item, head, query and key, tensors without dimensions, the new
            score; -inf hides. It may read tensors that it captures by any of these numbers; those
            of a floating dtype get their gradient. The score is float32, for float64 float64.
        block_mask: which keys each query sees: torch's BlockMask (`qkv.block_mask` makes one), for
            blocks that it lists as full without its function.
        scale, enable_gqa, return_lse: as in `attention`; score_mod sees scores that are scaled.
        kernel_options: tells torch's kernels how to run, and nothing about what is computed.
        return_aux: torch's AuxRequest: also return an AuxOutput of the lse and the greatest
            score of each query, which has no gradient and takes about as long as the output.
        attn_mask, dropout_p, is_causal, **options: as in `attention`: softcap before score_mod,
            alibi_slopes, bias and what hides after it.

    Returns:
        `[B, H, L, Dv]`; with return_lse also the lse, `[B, H, L]`, float64 for float64, else
        float32; with return_aux an AuxOutput. A row with nothing to attend to is 0, its lse -inf.

    Raises:
        ValueError: what score_mod does that has no instructions, with the line; a shape that does
            not fit; return_lse and return_aux at once.
        NotImplementedError: tensors that are not 4-D, or nested.
        RuntimeError: as `attention` does.

    Tensors on another device than the CPU go to torch's own function.

    Example:
        >>> table = torch.zeros(8, 199, requires_grad=True)  # by head and distance
        >>> def learned(score, b, h, q, k):
        ...     return score + table[h, q - k + 99]
        >>> query, key, value = torch.randn(3, 2, 8, 100, 64)
        >>> qkv.flex_attention(query, key, value, learned).sum().backward()
        >>> table.grad.shape
        torch.Size([8, 199])

    Source: Dong et al., "FlexAttention", 2024.
    """
    if not has_kernels(query):
        note_left("flex_attention", query, "torch")
        for name in _keywords(attn_mask, dropout_p, is_causal, **options):
            where = f"on {query.device}, {query.dtype}"
            _refuse("query", where, f"no {name} is expected there", NotImplementedError)
        return torchs_own()(
            query, key, value, score_mod, block_mask, scale, enable_gqa, return_lse, kernel_options,
            return_aux=return_aux,
        )  # fmt: skip
    _check(query, key, value, enable_gqa, return_lse, return_aux)
    given = _keywords(attn_mask, dropout_p, is_causal, scale, enable_gqa, **options)
    if block_mask is not None:
        from qkv._score_function.masked import check_mask, masked, spans_of

        check_mask(block_mask, query, key)
        spans = spans_of(block_mask)
        if spans is None or "spans" in given:
            score_mod, spans = masked(score_mod, block_mask)
        given.setdefault("spans", spans)
    if score_mod is not None:
        from qkv._score_function.arguments import arguments_of

        B, H, L = query.shape[:3]
        given |= arguments_of(score_mod, query, (B, H, L, key.size(-2)), given)
    with_lse = return_lse or (return_aux is not None and return_aux.lse)
    results = (_attention_with_lse if with_lse else _attention)(query, key, value, **given)
    if return_aux is None:
        return results
    from torch.nn.attention.flex_attention import AuxOutput

    output, lse = results if with_lse else (results, None)
    greatest = _greatest(query, key, value, given) if return_aux.max_scores else None
    return output, AuxOutput(lse=lse, max_scores=greatest)


@torch.no_grad()
def _greatest(query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any]) -> Tensor:
    """The greatest score of each query: the lse of the one key that hard attention chooses."""
    value = value[..., :1]
    given = {name: x for name, x in options.items() if name not in ("sinks", "dropout_p")}
    _, index = _hard_attention(query, key, value, **given)
    given["spans"] = torch.stack([index.clamp(min=0), index + 1], -1).int()
    return _attention_with_lse(query, key, value, **given)[1]


def _check(
    query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool, return_lse: bool, return_aux: Any
) -> None:  # fmt: skip
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x.dim() != 4 or x.is_nested:
            what = "nested" if x.is_nested else f"{x.dim()}-D"
            _refuse(name, what, "a dense 4-D tensor is expected", NotImplementedError)
    if not enable_gqa and query.size(1) != key.size(1):
        heads = f"{query.size(1)} heads are expected, as query has; or pass enable_gqa=True"
        _refuse("key", f"of {key.size(1)} heads", heads)
    if return_lse and return_aux is not None:
        lse = "return_lse alone, or return_aux=AuxRequest(lse=True), is expected"
        _refuse("return_aux", f"{return_aux} and return_lse True", lse)
