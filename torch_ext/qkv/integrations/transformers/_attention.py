"""The attention function: what transformers calls in every layer.

Where rows lie one after the other in memory, each attending to itself alone, they are packed: as
documents, and as batch items of which each has a number of keys of its own."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

import qkv
from qkv._functional import has_kernels
from qkv._verbose import note_left
from qkv._watched import is_watched
from qkv.integrations.transformers import _private
from qkv.integrations.transformers._chosen import with_chosen
from qkv.integrations.transformers._latents import Latents
from qkv.integrations.transformers._pattern_mask import FAR, PatternMask
from qkv.nn._attend import attend

Bounds = tuple[Tensor, Tensor]  # where documents begin, and where the last ends: queries, keys
# What some models give their attention beside a mask, and cannot do without: the first never, the
# others only where the cache is paged.
_REFUSED = {
    "sinks": "a sink for each query",
    "indices": "the keys that an indexer chose",
    "block_indices": "the blocks of keys that an indexer chose",
}


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor | Latents,
    value: Tensor | Latents,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    cache: Any = None,
    output_attentions: bool | None = False,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """What transformers' attention functions compute, by qkv's operators.

    Args:
        query, key, value: `[B, H, L, D]`, `[B, Hkv, S, D]`, `[B, Hkv, S, Dv]`; or Latents for both
            key and value, of which those of all heads are made.
        attention_mask: a PatternMask; or what a model or a user made, broadcastable to
            `[B, H, L, S]`, bool or added to the scores; or None. With None, L queries see the keys
            j <= i if L > 1 and is_causal (module.is_causal if None) says so, else all keys.
        position_bias: added to the scores beside the mask.
        sliding_window: a mask has it in it, and it is not looked at. With packed documents and
            without a mask, how many keys up to its own a query sees.
        s_aux: sinks, `[H]`.
        cache: the paged cache of continuous batching. key and value are put into it, and what
            comes out is packed like query.
        kwargs: `indices` or `block_indices`, the keys that an indexer chose, see `with_chosen`.
            `cu_seq_lens_q` and `cu_seq_lens_k`, `[N + 1]`, are the documents of query and key
            if a batch of one is packed and attention_mask does not say more.

    Returns:
        `[B, L, H, Dv]`, contiguous; and the weights, `[B, H, L, S]`, with output_attentions (not
        from a paged cache), else None.
    """
    paged = isinstance(cache, _private.PagedAttentionCache)
    _refuse(module, kwargs, _REFUSED if paged else ["sinks"])
    output_attentions = output_attentions or _attentions_collected()
    is_causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    # Where the operator cannot have them, the keys that an indexer chose become a part of the mask.
    indices = None if output_attentions or not has_kernels(query) else kwargs.pop("indices", None)
    attention_mask = with_chosen(attention_mask, module, query, key.shape[2], is_causal, kwargs)
    if not has_kernels(query):
        return _elsewhere(
            module, query, key, value, attention_mask, s_aux, dropout=dropout, scaling=scaling,
            is_causal=is_causal, position_bias=position_bias, softcap=softcap, cache=cache,
            output_attentions=output_attentions, **kwargs,
        )  # fmt: skip
    options = {"scale": scaling, "softcap": softcap or 0.0, "sinks": s_aux, "dropout_p": dropout}
    if indices is not None:
        options["indices"] = indices
    if isinstance(key, Latents) and (paged or output_attentions):
        key, value = key.expanded()  # what pages hold, and what weights are returned of
    if paged:
        pages: Any = cache  # whose update has a decorator that says nothing of methods
        key, value = pages.update(
            key_states=key, value_states=value, layer_idx=module.layer_idx, kwargs=kwargs
        )
    options["enable_gqa"] = query.shape[1] != key.shape[1]

    mask = None if paged else attention_mask  # models make one that knows nothing of the cache
    if isinstance(mask, PatternMask) and (
        indices is not None or _needs_dense(mask, query, key, position_bias, output_attentions)
    ):
        mask = mask.written
    packed = _packed(mask, is_causal, sliding_window, kwargs)
    if packed is None:
        return _rows(query, key, value, mask, is_causal, position_bias, output_attentions, options)
    if position_bias is not None or (output_attentions and not paged):
        raise NotImplementedError(
            f"{_OURS}: cu_seq_lens_q with position_bias or output_attentions; pass position_ids "
            "that say where documents begin instead"
        )
    bounds, options["window_size"] = packed
    return _attend_rows(query, key, value, bounds, options), None


_OURS = 'attn_implementation="qkv"'


def _refuse(module: nn.Module, kwargs: dict[str, Any], names: Iterable[str]) -> None:
    for name in names:
        if kwargs.get(name) is not None:
            raise NotImplementedError(
                f"{_OURS}: {type(module).__name__} passes {name}, {_REFUSED[name]}, and the result "
                'would be wrong without; use "sdpa" or "eager" for this model'
            )


def _attentions_collected() -> bool:
    """Whether a model above is collecting its layers' weights: some of them do not pass
    output_attentions on."""
    collector = _private._active_collector
    compiling = torch.compiler.is_compiling()  # a context variable would break the graph
    collected = collector.global_var if compiling else collector.get()
    return collected is not None and any(name.endswith("attentions") for name in collected)


def _elsewhere(module, query, key, value, attention_mask, s_aux, **kwargs):
    """transformers' own `sdpa`, for tensors that are not qkv's."""
    if s_aux is not None:
        raise NotImplementedError(
            f'{_OURS}: sinks (s_aux) on {query.device.type} in {query.dtype}, which "sdpa" would '
            'leave out; use "eager"'
        )
    if isinstance(attention_mask, PatternMask):
        attention_mask = attention_mask.written
    note_left("attention of transformers", query, "transformers' sdpa")
    return _private.sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)


def _rows(query, key, value, mask, is_causal, position_bias, output_attentions, options):
    """Attention of rows that are not packed: `[B, L, H, Dv]`, and the weights if asked for."""
    queries, keys = query.shape[2], key.shape[2]
    if isinstance(mask, PatternMask):
        is_plain = position_bias is None and not output_attentions
        lengths = mask.lengths if is_plain else None
        is_expanded = not isinstance(key, Latents)
        if lengths is not None and is_expanded and _one_after_the_other(query, key, value):
            # All queries of item b attend to its first lengths[b] keys: no other is computed.
            items = torch.arange(query.shape[0] + 1)
            options["seqused_k"] = lengths
            return _attend_rows(query, key, value, (items * queries, items * keys), options), None
        window = mask.band.window(queries, keys)
        assert window is not None  # or the mask would have been written out when it was made
        used, options["window_size"] = window
        if used < keys:
            key, value = key[:, :, :used], value[:, :, :used]
            position_bias = None if position_bias is None else position_bias[..., :used]
        if is_plain and mask.begins is not None and _may_be_cached(query, key, options):
            options["softmax_scale"] = options.pop("scale")
            del options["enable_gqa"], options["dropout_p"]
            options |= {"cache_leftpad": mask.begins, "cache_seqlens": used}
            output = qkv.attention_with_kvcache(query, key, value, **options)
            return output.transpose(1, 2).contiguous(), None
        options["spans"] = mask.spans
        mask = None if mask.padding is None else mask.padding[:, None, None, :used]
    elif mask is None:
        options["is_causal"] = is_causal if queries > 1 else False
    elif mask.is_floating_point() and mask.dtype not in (torch.float32, query.dtype):
        mask = mask.float()
    options |= {"attn_mask": mask, "bias": position_bias}
    if isinstance(key, Latents):
        del options["enable_gqa"]
        output, weights = key.attend(query, options), None
    else:
        output, weights = attend((query, key, value), bool(output_attentions), False, options)
    return output.transpose(1, 2).contiguous(), weights


def _may_be_cached(query, key, options) -> bool:
    """Whether rows that begin at keys of their own may go as those of a cache, whose results do not
    depend on where they begin. It has no derivatives, no dropout, and is not cast."""
    has_derivatives = torch.is_grad_enabled() or forward_ad._current_level >= 0
    is_refused = has_derivatives or options["dropout_p"] or torch.is_autocast_enabled("cpu")
    return not (isinstance(key, Latents) or is_refused or is_watched(query, key))


def _needs_dense(mask, query, key, position_bias, output_attentions) -> bool:
    """Whether the call cannot go by the pattern, or must not, since somebody has the mask."""
    lengths = query.shape[2], key.shape[2]
    if mask.changed or (mask.moves and torch.compiler.is_compiling()):
        return True
    if tuple(mask.shape[2:]) != lengths:
        return True
    if mask.documents is not None:
        return output_attentions or position_bias is not None
    return output_attentions and mask.band.window(*lengths)[0] != key.shape[2]


def _packed(
    mask: Tensor | None, is_causal: bool, sliding_window: int | None, kwargs: dict[str, Any]
) -> tuple[Bounds, tuple[int, int]] | None:
    """The documents that a mask has, or else those that `cu_seq_lens_q` and `cu_seq_lens_k` say, if
    the mask says no more than how far a query sees; and how far that is, as a window that is
    aligned to the end of each. Without a mask it is FlashAttention's: as wide on either side if not
    causal."""
    queries, keys = kwargs.get("cu_seq_lens_q"), kwargs.get("cu_seq_lens_k")
    left = -1 if sliding_window is None else sliding_window - 1
    window = left, 0 if is_causal else left
    if isinstance(mask, PatternMask):
        left, right = (-1 if abs(x) == FAR else x for x in (-mask.band.low, mask.band.high))
        window = left, right
        if mask.documents is not None:
            queries = keys = _bounds(mask.documents)
        elif mask.padding is not None or mask.spans is not None or mask.shape[2] != mask.shape[3]:
            return None
    elif mask is not None:
        return None
    return None if queries is None or keys is None else ((queries, keys), window)


def _bounds(documents: Tensor) -> Tensor:
    """Of documents in several rows, `[B, L]`, taken as one row after the other."""
    first = torch.ones_like(documents[:, :1], dtype=torch.bool)
    begins = torch.cat([first, documents[:, 1:] != documents[:, :-1]], 1).flatten()
    end = torch.tensor([documents.numel()])
    return torch.cat([begins.nonzero().flatten(), end])


def _one_after_the_other(*tensors: Tensor) -> bool:
    """Whether `[B, H, L, D]` is `[B * L, H, D]` without being copied."""
    return all(x.stride(0) == x.shape[2] * x.stride(2) for x in tensors)


def _attend_rows(query, key, value, bounds: Bounds, options: dict[str, Any]) -> Tensor:
    """`[B, L, H, Dv]` of `[B, H, L, D]`."""
    if isinstance(key, Latents):  # documents attend to themselves, and long ones gain nothing
        key, value = key.expanded()
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
    output = qkv.varlen_attn(q, k, v, *bounds, q.shape[0], k.shape[0], **options)
    assert isinstance(output, Tensor)
    return output.unflatten(0, (query.shape[0], query.shape[2])).contiguous()
