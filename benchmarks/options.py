"""The options that are measured: given a shape, their arguments, and torch's ways to the same
numbers."""

import math
from dataclasses import replace

import torch

from qkv.bench.shapes import SPELLING as SHAPE_SPELLING
from qkv.bench.shapes import Shape

from . import by_hand, compiled, masks, ours, packing
from . import torch_ways as ways
from .entry import Entry, Option, plain, sdpa

DROPOUT = 0.1
SOFTCAP = 50.0  # Gemma 2's
WINDOW = (255, 0)  # the last 256 keys
SHORTEST = 16  # of the documents drawn


def quarter(shape):
    length = max(1, shape.seqlen_q // 4)
    return entry("L / 4", "window-alone", replace(shape, seqlen_q=length, seqlen_k=length))


def bias_alone(shape):
    return entry("bias", "bias", shape)


def equal_documents(shape):
    """As many documents of one length, with the same number of scores but for rounding."""
    mean_square = sum(n * n for n in drawn(shape)) / shape.batch
    length = round(math.sqrt(mean_square))
    return entry("equal lengths", "equal", replace(shape, seqlen_q=length, seqlen_k=length))


def drawn(shape):
    """Lengths of `batch` documents, or numbers of keys, from SHORTEST to seqlen_k."""
    random = torch.Generator().manual_seed(0)
    lowest = min(SHORTEST, shape.seqlen_k)
    return torch.randint(lowest, shape.seqlen_k + 1, (shape.batch,), generator=random).tolist()


def equal(shape):
    return [shape.seqlen_q] * shape.batch


def packed_scores(lengths):
    def scores(shape):
        pairs = shape.heads * sum(n * n for n in lengths(shape))
        return pairs / 2 if shape.is_causal else pairs

    return scores


def window_scores(shape):
    left, right = WINDOW
    pairs = 0
    for i in range(shape.seqlen_q):
        pairs += min(shape.seqlen_k, i + right + 1) - max(0, i - left)
    return shape.batch * shape.heads * pairs


def dropout(shape, randn):
    return {"dropout_p": DROPOUT}


def bias(shape, randn):
    return {"bias": randn(1, shape.heads, shape.seqlen_q, shape.seqlen_k).requires_grad_()}


def padding(shape, randn):
    """A bool mask [B, 1, 1, S]: the keys of each batch item up to a length of its own."""
    lengths = torch.tensor(drawn(shape))
    return {"attn_mask": (torch.arange(shape.seqlen_k) < lengths[:, None])[:, None, None]}


def padded_bias(shape, randn):
    return bias(shape, randn) | padding(shape, randn)


def mask(shape, randn):
    """A quarter is hidden, but never the first key."""
    allowed = randn(shape.seqlen_q, shape.seqlen_k) > -0.67
    allowed[:, 0] = True
    return {"attn_mask": allowed}


def softcap(shape, randn):
    return {"softcap": SOFTCAP}


def alibi(shape, randn):
    heads = torch.arange(1, shape.heads + 1)
    return {"alibi_slopes": (2.0 ** (-8 * heads / shape.heads)).to(randn(0).dtype)}


def slopes(shape, randn):
    return {name: x.requires_grad_() for name, x in alibi(shape, randn).items()}


def sinks(shape, randn):
    return {"sinks": randn(shape.heads).requires_grad_()}


def window(shape, randn):
    return {"window_size": WINDOW}


def filled(shape, randn):
    return {"seqlen_k": shape.seqlen_k}


def int8_numbers(shape, randn):
    """A full cache of numbers that int8 has, times a power of two that every dtype has."""

    def drawn(head_dim):
        x = randn(shape.batch, shape.kv_heads, shape.seqlen_k, head_dim)
        return (x / ours.INT8_SCALE).round().clamp(-127, 127) * ours.INT8_SCALE

    return filled(shape, randn) | {"key": drawn(shape.head_dim), "value": drawn(shape.head_dim_v)}


def not_int8(shape):
    return entry("cache", "cache", shape)


SDPA = {"SDPA": sdpa}
BY_HAND = {"by hand": by_hand.by_hand}
COMPILED = {"by hand, compiled": compiled.textbook}
FLEX = {"FlexAttention": compiled.flex}
BOOL = {"SDPA, bool mask": ways.bool_mask}
FLOAT = {"SDPA, float mask": ways.float_mask}
ONE_MASK = {
    "SDPA, bias where seen": ways.selected_bias,
    "SDPA, bias masked": ways.masked_bias,
    "SDPA, bias + float mask": ways.added_bias,
}
PADDED = {
    "padded SDPA, bool mask": packing.padded_bool,
    "padded SDPA, float mask": packing.padded_float,
}
WINDOW_PAIRS = {"scores": window_scores, "is_square": True}
PACKED = {"call": ours.packed, "is_square": True}
DRAWN = {"lengths": drawn, "scores": packed_scores(drawn), **PACKED}
EQUAL = {"lengths": equal, "scores": packed_scores(equal), **PACKED}
CACHED = {"call": ours.cached, "is_cold": True}

OPTIONS = {
    "plain": Option(ways=SDPA | COMPILED | FLEX),
    "alone": Option(),  # beside no way of torch's, which would take too much memory or too long
    "plain-padded": Option(ways={"SDPA, q and k zero-padded": ways.zero_padded}),
    "dropout": Option(dropout, SDPA | BY_HAND | COMPILED, plain),
    "bias": Option(bias, {"SDPA": ways.masked_bias} | BY_HAND | COMPILED, plain),
    "bias-padded": Option(padded_bias, ONE_MASK | BY_HAND | COMPILED, bias_alone),
    "padding": Option(padding, BOOL | FLOAT | COMPILED, plain),
    "mask": Option(mask, BOOL | FLOAT | COMPILED, plain),
    "softcap": Option(softcap, BY_HAND | COMPILED | FLEX, plain),
    "alibi": Option(alibi, BY_HAND | FLOAT | COMPILED | FLEX, plain),
    "slopes": Option(slopes, BY_HAND | COMPILED, plain),
    "sinks": Option(sinks, BY_HAND | COMPILED, plain),
    "sinks-key": Option(sinks, {"SDPA, one more key": ways.one_more_key}, plain),
    "weights": Option(
        ways={"by hand": by_hand.by_hand_with_weights}, base=plain, call=ours.with_weights
    ),
    "window": Option(window, BOOL | FLOAT | FLEX, **WINDOW_PAIRS),
    "window-cut": Option(window, {"SDPA, cut by hand": ways.cut_window}, **WINDOW_PAIRS),
    "window-alone": Option(window, **WINDOW_PAIRS),
    "growth": Option(window, base=quarter, **WINDOW_PAIRS),
    "varlen": Option(ways=PADDED, base=equal_documents, **DRAWN),
    "varlen-each": Option(ways={"SDPA for each": packing.each_document}, **DRAWN),
    "equal": Option(**EQUAL),
    "cache": Option(filled, {"SDPA": packing.cached}, **CACHED),
    "int8": Option(
        int8_numbers,
        {"SDPA, cache widened": packing.widened},
        not_int8,
        prepare=ours.as_int8,
        itemsize=1,
        refuses=(torch.float64,),
        **CACHED,
    ),
    "paged": Option(
        filled, {"SDPA, pages gathered": packing.gathered}, prepare=ours.pages, **CACHED
    ),
    **masks.OPTIONS,
}

SPELLING = f"[OPTION:]{SHAPE_SPELLING}; OPTION one of {', '.join(OPTIONS)}"


def entry(name, option, shape):
    return Entry(name, shape, option, OPTIONS[option])


def parse(text, default="plain"):
    """The Entry of text that is SPELLING; default: the option if it has none. Raises ValueError."""
    option, _, spelling = text.rpartition(":")
    option = option or default
    if option not in OPTIONS:
        raise ValueError(f"'{option}' is no option; expected one of {', '.join(OPTIONS)}")
    how, shape = OPTIONS[option], Shape.parse(spelling)
    if how.is_square and shape.seqlen_q != shape.seqlen_k:
        raise ValueError(f"'{text}': {option} needs as many keys as queries")
    if how.is_cold and shape.is_causal:
        raise ValueError(f"'{text}': with {option} every query sees all keys, expected no 'c'")
    return entry(text, option, shape)
