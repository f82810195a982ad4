"""Calls of merge: drawn, and the truth of them."""

import dense
import torch
from draw import SUFFIX, Draw
from formula import Options, attend


def merge(seed):
    d = Draw(seed, "merge")
    parts, lead = d.between(1, 4), d.pick([(3,), (2, 3), (1, 4)])
    L, Dv = d.length(40), d.pick((1, 3, 16))
    outputs, lses = ([f"{x}{n}" for n in range(parts)] for x in ("output", "lse"))
    lse_dtype = torch.float64 if d.dtype == torch.float64 else torch.float32
    spread, offset = d.pick(((1, 0), (30, 0), (3, 1e4), (1e5, 0)))
    for output, lse in zip(outputs, lses, strict=True):
        d.tensor(output, (*lead, L, Dv))
        sizes = ", ".join(map(str, (*lead, L)))
        d.tensors[lse] = (
            f"(normal({d.seed()}, {sizes}) * {spread} + {offset})"
            f".masked_fill(normal({d.seed()}, {sizes}) < -0.7, -math.inf){SUFFIX[lse_dtype]}"
        )
    form = f"qkv.merge([{', '.join(outputs)}], [{', '.join(lses)}])"
    call = dense.finish(
        d, "merge", form, ("output", "lse"), true_merge, leaves=(*outputs, *lses),
        cotangents=("output", "lse"), order=d.order(), facts={"parts": parts}, composed=True,
    )  # fmt: skip
    return call


def true_merge(v, arithmetic):
    """The parts' outputs are values, and their lses the scores of one more attention."""
    outputs, lses = ([v[f"{x}{n}"] for n in range(v["parts"])] for x in ("output", "lse"))
    value = torch.stack(outputs, -2).flatten(0, -4).flatten(0, 1)  # [rows, parts, Dv]
    scores = torch.stack(lses, -1).view(-1, 1, v["parts"])
    zero = value.new_zeros(1).expand(len(scores), 1, 1)
    key = zero.expand(-1, v["parts"], 1)
    found = attend(zero, key, value, Options(masks=(scores,)), arithmetic)
    shape = outputs[0].shape
    return found.output.reshape(shape), found.lse.reshape(shape[:-1])
