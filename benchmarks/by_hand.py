"""Attention as a textbook writes it, of torch's operators."""

import math
from functools import partial

import torch
import torch.nn.functional as F

from qkv.testing import distance, visible

from .call import Call


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
