"""Calls of rotate: drawn, and the truth of them."""

import dense
import torch
from draw import Draw


def rotate(seed):
    d = Draw(seed, "rotate")
    lead, L, D = d.pick([(), (1,), (2,), (2, 3)]), d.length(60), d.pick((2, 7, 16, 32, 40, 64, 80))
    pairs = d.pick({D // 2: 3, D // 4: 1})
    mood = d.start_numbers()
    for name, heads in (("query", d.between(0, 4)), ("key", d.between(0, 3))):
        d.tensor(name, (*lead, heads, L, D), mood, role="query")
    wide = {d.dtype: 1, torch.float32: 1} if d.dtype != torch.float64 else {d.dtype: 1}
    shape = d.broadcast((*lead, L, pairs), 2)
    for name in ("cos", "sin"):
        d.tensor(name, shape, dtype=d.pick(wide), role="value")
    for name in ("query_weight", "key_weight"):
        if d.chance(0.6):
            d.tensor(name, (D,), dtype=d.pick(wide), role="value")
            d.keywords[name] = name
    if d.chance(0.4):
        d.keywords["interleaved"] = "True"
    if d.chance(0.4):
        d.keywords["eps"] = d.pick(("1e-5", "0.1"))
    return dense.finish(
        d, "rotate", "qkv.rotate(query, key, cos, sin{keywords})", ("rotated", "rotated_key"),
        true_rotate, leaves=("query", "key", "cos", "sin", "query_weight", "key_weight"),
        cotangents=("rotated", "rotated_key"), order=d.order(), composed=True,
    )  # fmt: skip


def true_rotate(v, arithmetic):
    cos, sin = v["cos"].unsqueeze(-3), v["sin"].unsqueeze(-3)
    pairs, step = cos.size(-1), 2 if v.get("interleaved") else 1

    def rotated(x, weight):
        if weight is not None:
            x = x * weight / (x.square().mean(-1, keepdim=True) + v.get("eps", 1e-6)).sqrt()
        places = torch.arange(pairs) * step
        a, b = places, places + (1 if step == 2 else pairs)
        y = x.index_select(-1, a), x.index_select(-1, b)
        turned = torch.cat([y[0] * cos - y[1] * sin, y[1] * cos + y[0] * sin], -1)
        order = torch.cat([a, b]).argsort()
        return torch.cat([turned.index_select(-1, order), x[..., 2 * pairs :]], -1)

    return rotated(v["query"], v.get("query_weight")), rotated(v["key"], v.get("key_weight"))
