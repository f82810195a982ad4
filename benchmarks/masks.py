"""Masks as models write them, each as a function of positions: as Spans for us, as a block mask for
FlexAttention and as a boolean mask for SDPA. None of these is made in the time that is measured."""

import functools
import operator
import random
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn.attention.flex_attention import create_block_mask

from qkv.spans import tensor_of

from . import compiled
from . import torch_ways as ways
from .entry import Option, plain

GRID = 64  # rows and columns of points, whose neighbourhoods are of 7 x 7
DRAWN = 10  # masks


def everything(b, h, i, j):
    return (i >= 0) & (j >= 0)


def documents(b, h, i, j):
    """Of 512 positions each, causal."""
    return (i // 512 == j // 512) & (i >= j)


def window(b, h, i, j):
    """The last 256 keys, and 64 that all queries see; causal."""
    return (i >= j) & ((i - j < 256) | (j < 64))


def prefix(b, h, i, j):
    return (j < 1024) | (i >= j)


def neighborhood(b, h, i, j):
    """7 x 7 points around each of a grid of GRID columns, and at the edges the nearest 7 x 7."""

    def near(x, y):
        return (y - x.clamp(3, GRID - 4)).abs() <= 3

    return near(i // GRID, j // GRID) & near(i % GRID, j % GRID)


def blocks_of(size, share, seed):
    """Blocks of so many queries and keys, this share of them at random, and what is before each
    query by less than a block."""
    generator = torch.Generator().manual_seed(seed)
    shown = torch.rand(1024, 1024, generator=generator) < share

    def blocks(b, h, i, j):
        return shown[i // size % 1024, j // size % 1024] | ((i - j).abs() < size)

    return blocks


def documents_of(longest, seed):
    """Documents of random lengths up to `longest`."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, longest + 1, (1 << 14,), generator=generator)
    ids = torch.repeat_interleave(lengths)[: 1 << 16]
    return lambda b, h, i, j: ids[i] == ids[j]


def drawn(seed):
    """Two terms, joined by `and` or `or`, causal or not. Every query sees its own position."""
    draw = random.Random(seed)
    size, left, right = draw.choice([32, 64, 100]), draw.randint(0, 999), draw.randint(0, 999)
    terms = [
        documents_of(draw.randint(100, 2000), seed),
        blocks_of(size, draw.choice([0.02, 0.1, 0.3]), seed),
        lambda b, h, i, j: (i - j <= left) & (j - i <= right),
        lambda b, h, i, j: i // (2 * left + 1) == j // (2 * left + 1),
        lambda b, h, i, j: j < right,
    ]
    first, second = draw.sample(terms, 2)
    join, is_causal = draw.choice([operator.and_, operator.or_]), draw.random() < 0.5

    def mask(b, h, i, j):
        seen = join(first(b, h, i, j), second(b, h, i, j)) | (i == j)
        return seen & (i >= j) if is_causal else seen

    return mask


@dataclass(frozen=True)
class Pattern:
    """What a mask does with a shape. seen: FlexAttention's mask_mod."""

    seen: Callable

    @functools.lru_cache(maxsize=2)  # noqa: B019, patterns live as long as the program
    def block_mask(self, seqlen_q, seqlen_k):
        return create_block_mask(self.seen, None, None, seqlen_q, seqlen_k, device="cpu")

    def arguments(self, shape, randn):
        """The block mask remembers its spans."""
        return {"spans": tensor_of(self.block_mask(shape.seqlen_q, shape.seqlen_k))}

    def scores(self, shape):
        spans = self.arguments(shape, None)["spans"]
        pairs = spans[..., 1::2].sum() - spans[..., ::2].sum()
        return shape.batch * shape.heads * pairs.item()

    def flex(self, inputs, grad_output):
        return compiled.flex(inputs, grad_output, self.block_mask(*ways.sizes(inputs)))


def option(seen):
    pattern = Pattern(seen)
    torchs = {"SDPA, bool mask": ways.bool_mask, "FlexAttention": pattern.flex}
    return Option(pattern.arguments, torchs, plain, scores=pattern.scores)


MASKS = {
    "all": everything,
    "documents": documents,
    "window+global": window,
    "prefix": prefix,
    "neighborhood": neighborhood,
    "blocks": blocks_of(64, 0.1, 0),
    **{f"drawn{n}": drawn(n) for n in range(DRAWN)},
}
OPTIONS = {name: option(seen) for name, seen in MASKS.items()}
