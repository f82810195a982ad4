"""Calls of latent attention, and keys and values written out: what its tests have in common."""

import torch
from common import compute_type

from qkv import testing

H, L, S, N, R, C, DV = 3, 5, 9, 6, 4, 8, 7
NAMES = ("query_nope", "query_rope", "latents", "rope_keys", "key_weight", "value_weight")


def make(lead=(2,), *, H=H, L=L, S=S, N=N, R=R, C=C, Dv=DV, dtype=torch.float64, grad=False):
    """The six tensors of a call, by their names."""
    queries, keys, weights = ((*lead, H, L), (*lead, 1, S), (H,))
    shapes = (
        (*queries, N), (*queries, R), (*keys, C), (*keys, R), (*weights, N, C), (*weights, Dv, C)
    )  # fmt: skip
    found = dict(zip(NAMES, map(torch.randn, shapes), strict=True))
    for name in NAMES[4:]:
        found[name] /= max(1, C) ** 0.5
    return {n: x.to(dtype).requires_grad_(grad) for n, x in found.items()}


def in_rows(call):
    """The same call, whose latents and rotated keys are one tensor."""
    rows = torch.cat([call["latents"], call["rope_keys"]], -1)
    return call | {"latents": rows, "rope_keys": None}


def heads_of(latents, rope_keys, key_weight, value_weight):
    """Keys [..., H, S, N + R] and values [..., H, S, Dv], a head at a time."""
    keys, values = [], []
    for of_key, of_value in zip(key_weight, value_weight, strict=True):
        keys.append(torch.cat([latents @ of_key.mT, rope_keys], -1))
        values.append(latents @ of_value.mT)
    return torch.cat(keys, -3), torch.cat(values, -3)


def expand(call):
    """Query, key and value of the attention that a call of six tensors is."""
    query = torch.cat([call["query_nope"], call["query_rope"]], -1)
    return query, *heads_of(*(call[n] for n in NAMES[2:]))


def truth(call, **options):
    """(output, lse) in float64."""
    doubles = {n: x.double() for n, x in call.items()}
    return testing.attention(*expand(doubles), **options, return_lse=True)


def torchs(call, **options):
    """(output, lse) as torch computes them by keys and values made in the tensors' dtype, halves
    widened for the attention alone: what either way must be as accurate as."""
    dtype = call["query_nope"].dtype
    wide = compute_type(dtype)
    output, lse = testing.attention(*expand(call), **options, dtype=wide, return_lse=True)
    return output.to(dtype), lse
