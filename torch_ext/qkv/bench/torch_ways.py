"""How torch gets the same numbers. Each way takes the inputs of our call and grad_output, and
returns a Call; what a model would prepare once, a mask of positions or the padding, is prepared
here and not timed."""

import math
from functools import partial

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from qkv.testing import distance, visible

from .call import Call


def sdpa(inputs, grad_output):
    return Call(F.scaled_dot_product_attention, inputs, grad_output)


def on_math_path(function):
    """function with SDPA as matrix products and a softmax: of its paths on a CPU, the only one that
    torch can derive a second time, or in forward mode."""

    def on_math(**inputs):
        with sdpa_kernel(SDPBackend.MATH):
            return function(**inputs)

    return on_math


def one_mask(join, prepare=lambda seen, dtype: seen):
    """torch takes one mask, and none beside is_causal. join(bias, prepare(seen, dtype)) makes one
    of a bias and of what may be seen, in every call, because the bias learns."""

    def way(inputs, grad_output):
        seen = shown(inputs)
        prepared = seen if seen is None else prepare(seen, inputs["bias"].dtype)

        def function(query, key, value, bias, enable_gqa, **_):
            mask = bias if prepared is None else join(bias, prepared)
            return F.scaled_dot_product_attention(query, key, value, mask, enable_gqa=enable_gqa)

        return Call(function, inputs, grad_output)

    return way


def additive(seen, dtype):
    """The float mask that hides what is not seen."""
    return torch.zeros(seen.shape, dtype=dtype).masked_fill_(~seen, -math.inf)


masked_bias = one_mask(lambda bias, seen: bias.masked_fill(~seen, -math.inf))
selected_bias = one_mask(lambda bias, seen: torch.where(seen, bias, -math.inf))
added_bias = one_mask(torch.add, additive)


def composed(
    query, key, value, *, attn_mask=None, dropout_p=0.0, is_causal=False, enable_gqa=False,
    window_size=None, softcap=0.0, alibi_slopes=None, sinks=None, bias=None, need_weights=False,
):  # fmt: skip
    """As models write it by hand, with as few passes over the scores as torch's operators allow:
    a competitor to be timed, and no reference. Every query must see a key."""
    L, S = query.size(-2), key.size(-2)
    by_kv_head = (query.size(0), key.size(1), -1)  # the rows of a group of heads below each other
    query = query * query.size(-1) ** -0.5
    scores = (query.reshape(*by_kv_head, query.size(-1)) @ key.mT).view(*query.shape[:-1], S)
    if softcap:
        scores = (scores / softcap).tanh() * softcap
    if alibi_slopes is not None:
        scores = scores - alibi_slopes[..., None, None] * distance(L, S)
    if bias is not None:
        scores = scores + bias
    if attn_mask is not None:
        scores = scores.masked_fill(~attn_mask, -math.inf)
    if is_causal or window_size:
        scores = scores.masked_fill(~visible(L, S, is_causal, window_size), -math.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks[..., None, None].expand(*scores.shape[:-1], 1)], -1)
    weights = scores.softmax(-1)[..., :S]
    if dropout_p:
        weights = F.dropout(weights, dropout_p)
    if need_weights:
        weights.mean(1)  # what nobody asks for here is made all the same, to be timed
    output = weights.reshape(*by_kv_head, S) @ value
    return output.view(*query.shape[:-1], value.size(-1))


def by_hand(inputs, grad_output):
    return Call(composed, inputs, grad_output)


def by_hand_with_weights(inputs, grad_output):
    return Call(partial(composed, need_weights=True), inputs, grad_output)


def bool_mask(inputs, grad_output):
    mask = shown(inputs)
    return Call(F.scaled_dot_product_attention, masked(inputs, mask), grad_output)


def float_mask(inputs, grad_output):
    L, S = sizes(inputs)
    mask = torch.zeros(L, S, dtype=inputs["query"].dtype)
    if "alibi_slopes" in inputs:
        mask = mask - inputs["alibi_slopes"][..., None, None] * distance(L, S)
    seen = shown(inputs)
    if seen is not None:
        mask = mask.masked_fill(~seen, -math.inf)
    return Call(F.scaled_dot_product_attention, masked(inputs, mask), grad_output)


def sizes(inputs):
    return inputs["query"].size(-2), inputs["key"].size(-2)


def shown(inputs):
    """Everything that hides pairs, as one bool mask; None if nothing does."""
    mask, window = inputs.get("attn_mask"), inputs.get("window_size")
    if not inputs["is_causal"] and not window:
        return mask
    positions = visible(*sizes(inputs), inputs["is_causal"], window)
    return positions if mask is None else mask & positions


def masked(inputs, mask):
    kept = {name: inputs[name] for name in ("query", "key", "value", "enable_gqa")}
    return kept | {"attn_mask": mask}


def zero_padded(inputs, grad_output):
    """torch's fused kernel wants d_v = d."""

    def function(query, key, value, is_causal, enable_gqa):
        scale = query.size(-1) ** -0.5
        dim = max(query.size(-1), value.size(-1))
        query, key, padded = (F.pad(x, (0, dim - x.size(-1))) for x in (query, key, value))
        output = F.scaled_dot_product_attention(
            query, key, padded, is_causal=is_causal, enable_gqa=enable_gqa, scale=scale,
        )  # fmt: skip
        return output[..., : value.size(-1)]

    return Call(function, inputs, grad_output)


def one_more_key(inputs, grad_output):
    """The sink is the score of a key of its own, whose value is 0: through one more dimension, in
    which all queries are 1 / scale, that key is the sink and all others are 0."""
    mask = shown(inputs)
    mask = mask if mask is None else F.pad(mask, (0, 1), value=True)

    def function(query, key, value, sinks, is_causal, enable_gqa):
        dim, group = query.size(-1), query.size(1) // key.size(1)
        if enable_gqa:  # a sink belongs to a query head
            key, value = (x.repeat_interleave(group, 1) for x in (key, value))
        query = F.pad(query, (0, 1), value=dim**0.5)
        sink = F.pad(sinks[:, None, None], (dim, 0)).expand(key.size(0), -1, 1, -1)
        key = torch.cat([F.pad(key, (0, 1)), sink], -2)
        value = F.pad(value, (0, 1, 0, 1))
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=dim**-0.5)[
            ..., :-1
        ]

    return Call(function, inputs, grad_output)


def cut_window(inputs, grad_output):
    """A window of W keys, cut: W queries at a time see 2 W keys."""
    query = inputs["query"]
    batch, heads, length, _ = query.shape
    width = inputs["window_size"][0] + 1
    pieces = -(-length // width)
    mask = visible(width, 2 * width, window_size=(width - 1, 0))
    mask = mask.repeat(pieces, 1, 1)
    mask[0, :, :width] = False  # before the first key
    mask = additive(mask, query.dtype).repeat(batch, 1, 1)[:, None]

    def cut(x, size):
        """[B, H, L, D] -> [B * pieces, H, size, D], overlapping where size is larger than W"""
        x = F.pad(x, (0, 0, size - width, pieces * width - length))
        return x.unfold(-2, size, width).movedim(2, 1).flatten(0, 1).mT

    def function(query, key, value, window_size, is_causal, enable_gqa):
        output = F.scaled_dot_product_attention(
            cut(query, width), cut(key, 2 * width), cut(value, 2 * width),
            attn_mask=mask, enable_gqa=enable_gqa,
        )  # fmt: skip
        return output.unflatten(0, (batch, pieces)).movedim(1, 2).flatten(2, 3)[:, :, :length]

    return Call(function, inputs, grad_output)


def documents(inputs):
    return inputs["cu_seq_q"].diff().tolist()


def padded(inputs, grad_output, dtype):
    """[documents, H, longest, D]; the mask hides the padding."""
    lengths = documents(inputs)

    def pad(x):
        return torch.nn.utils.rnn.pad_sequence(x.detach().split(lengths), True).transpose(1, 2)

    def ours(x):
        return torch.cat([x[i, :, :n].transpose(0, 1) for i, n in enumerate(lengths)])

    mask = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None])[:, None, None]
    if inputs["is_causal"]:
        mask = mask & torch.ones(max(lengths), max(lengths), dtype=torch.bool).tril()
    if dtype != torch.bool:
        mask = additive(mask, dtype)
    tensors = {name: pad(inputs[name]).requires_grad_() for name in ("query", "key", "value")}
    tensors |= {"attn_mask": mask, "enable_gqa": inputs["enable_gqa"]}
    return Call(F.scaled_dot_product_attention, tensors, pad(grad_output), ours)


def padded_bool(inputs, grad_output):
    return padded(inputs, grad_output, torch.bool)


def padded_float(inputs, grad_output):
    return padded(inputs, grad_output, grad_output.dtype)


def each_document(inputs, grad_output):
    lengths = documents(inputs)

    def function(query, key, value, is_causal, enable_gqa, **_):
        outputs = [
            F.scaled_dot_product_attention(
                *(x.transpose(0, 1)[None] for x in document),
                is_causal=is_causal, enable_gqa=enable_gqa,
            )
            for document in zip(*(x.split(lengths) for x in (query, key, value)), strict=True)
        ]  # fmt: skip
        return torch.cat([x[0].transpose(0, 1) for x in outputs])

    return Call(function, inputs, grad_output)


def cached(inputs, grad_output):
    """torch has no cache; its caller keeps one."""

    def function(query, key, value, seqlen_k, is_causal, enable_gqa):
        return F.scaled_dot_product_attention(query, key, value, enable_gqa=enable_gqa)

    return Call(function, inputs, grad_output)


def gathered(inputs, grad_output):
    """Pages put in order at every call: at each there is one key more."""

    def function(query, key, value, block_table, seqlen_k, is_causal, enable_gqa):
        def gather(x):
            return x[block_table].transpose(1, 2).flatten(2, 3)[:, :, :seqlen_k]

        return F.scaled_dot_product_attention(
            query, gather(key), gather(value), enable_gqa=enable_gqa
        )

    return Call(function, inputs, grad_output)
