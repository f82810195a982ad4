"""What is measured: shapes, our call and torch's call. A new suite is a new entry of SUITES."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

import qkv

from .shapes import Shape


@dataclass(frozen=True)
class Suite:
    """Both calls take (shape, query, key, value) and return the output
    [batch, heads, seqlen_q, head_dim_v]."""

    shapes: tuple[Shape, ...]
    qkv: Callable[..., torch.Tensor]
    torch: Callable[..., torch.Tensor]


def attention(shape, query, key, value):
    return qkv.attention(query, key, value, is_causal=shape.is_causal, enable_gqa=shape.is_grouped)


def sdpa(shape, query, key, value):
    return F.scaled_dot_product_attention(
        query, key, value, is_causal=shape.is_causal, enable_gqa=shape.is_grouped
    )


def named(shapes):
    return tuple(Shape.parse(spelling, name) for name, spelling in shapes.items())


GRID = {
    "vit-s": "8x6x197x197x64",
    "bert": "8x12x512x512x64",
    "gpt2": "4x12x1024x1024x64c",
    "base": "1x8x1024x1024x64",
    "long": "1x8x4096x4096x64c",
    "long1h": "1x1x4096x4096x64",
    "llama": "1x32/8x1024x1024x128c",
    "sd-unet": "2x8x4096x4096x40",
    "tiny": "64x4x16x16x32",
    "cross": "4x8x64x1500x64",
    "d256": "1x8x1024x1024x256c",
    "decode1": "1x32/8x1x4096x128",
    "decode": "8x32/8x1x4096x128",
}

SUITES = {"grid": Suite(named(GRID), attention, sdpa)}
