"""How far a tensor is from the truth."""

import math

import torch


def same_bits(x, y):
    if x.shape != y.shape or x.dtype != y.dtype:
        return False
    x, y = (z.detach().contiguous().flatten().view(torch.uint8) for z in (x, y))
    return torch.equal(x, y)


def distance(x, truth):
    """The largest distance; NaN and infinity, where both have them, count as equal."""
    x, truth = x.detach().double(), truth.detach().double()
    if not x.numel():
        return 0.0
    off = (x - truth).abs().masked_fill((x == truth) | (x.isnan() & truth.isnan()), 0)
    return off.nan_to_num(nan=math.inf).max().item()


def size_of(x):
    x = x.detach().double()
    x = x.masked_fill(~x.isfinite(), 0)
    return x.abs().max().item() if x.numel() else 0.0


def rms(x, truth):
    off = x.detach().double() - truth.detach().double()
    off = off.masked_fill(~off.isfinite(), 0)
    return off.square().mean().sqrt().item() if off.numel() else 0.0
