"""How torch's scaled_dot_product_attention gets the same numbers. Each way takes the inputs of our
call and grad_output, and returns a Call; what a model would prepare once, a mask of positions or
the padding, is prepared here and not timed."""

import math

import torch
import torch.nn.functional as F

from qkv import Spans
from qkv.testing import distance, visible

from .call import Call


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
    if "spans" in inputs:
        mask = Spans(inputs["spans"]).to_mask(sizes(inputs)[1])
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
