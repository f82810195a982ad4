"""Calls of qkv.nn.MultiheadAttention: drawn, and the truth of them."""

import dense
import torch
from draw import SUFFIX, Draw
from formula import Options, attend
from layers import batch, parameter


def multihead(seed):
    d = Draw(seed, "nn.MultiheadAttention")
    (B,), L, S = batch(d, 20, 20)
    L, S = max(1, L), max(1, S)
    H, width = d.pick((1, 2, 3)), d.pick((1, 4, 16))
    E = H * width
    named = {n: parameter(d, n, *shape) for n, shape in {
        "in_proj_weight": (3 * E, E), "in_proj_bias": (3 * E,), "out_proj_weight": (E, E),
        "out_proj_bias": (E,)}.items()}  # fmt: skip
    for name, n in (("query", L), ("key", S), ("value", S)):
        d.tensor(
            name,
            (B, n, E),
            d.pick(("ordinary", "ordinary", "mean")) if name == "key" else "ordinary",
        )
    constructor, extra = constructed(d, L, S)
    if "window_size" not in constructor and "alibi" not in constructor and d.chance(0.2):
        constructor += ", add_bias_kv=True"
        named |= {n: parameter(d, n, 1, 1, E) for n in ("bias_k", "bias_v")}
    masks(d, B, H, L, S)
    average = d.pick(("True", "False"))
    parameters = ", ".join(
        f'"{n.replace("out_proj_", "out_proj.")}": {x}' for n, x in named.items()
    )
    form = (
        f"torch.func.functional_call(layer, {{{parameters}}}, (query, key, value), "
        f"dict(average_attn_weights={average}{{keywords}}))"
    )
    return dense.finish(
        d, "nn.MultiheadAttention", form, ("output", "weights"), true_multihead,
        leaves=("query", "key", "value", *named, "attn_bias"), cotangents=("output", "weights"),
        order=d.order(0.2), facts=extra | {"heads": H, "average": average == "True"},
        setup=(
            f"layer = qkv.nn.MultiheadAttention({E}, {H}, batch_first=True{constructor})",
            f"layer = layer.to({d.dtype})",
        ),
        torchs=True,
    )  # fmt: skip


def constructed(d, L, S):
    """(text, the same options for the truth)."""
    text, extra = "", {}
    if d.chance(0.3):
        extra["softcap"] = 3.0
    if d.chance(0.3):
        extra["scale"] = 0.3
    if d.chance(0.3):
        extra["window_size"] = (d.pick((-1, 0, 2)), d.pick((-1, 0, 2)))
    text = "".join(f", {n}={x}" for n, x in extra.items())
    return text, extra


def masks(d, B, H, L, S):
    for name, shape, p in (("key_padding_mask", (B, S), 0.4), ("attn_mask", (L, S), 0.4)):
        if d.chance(p):
            sizes = ", ".join(map(str, (d.seed(), *shape)))
            d.tensors[name] = f"normal({sizes}) < -0.5"
            d.keywords[name] = name
    if d.chance(0.4):
        shape = d.broadcast((B, H, L, S), 2)
        d.tensors["attn_bias"] = (
            f"normal({', '.join(map(str, (d.seed(), *shape)))}){SUFFIX[d.dtype]}"
        )
        d.keywords["attn_bias"] = "attn_bias"


def true_multihead(v, arithmetic):
    H, E = v["heads"], v["query"].size(-1)
    projected = []
    for n, name in enumerate(("query", "key", "value")):
        rows = slice(n * E, (n + 1) * E)
        projected.append(v[name] @ v["in_proj_weight"][rows].mT + v["in_proj_bias"][rows])
    query, key, value = projected
    B, L, S = query.size(0), query.size(1), key.size(1)
    seen = torch.ones(B, 1, L, S, dtype=torch.bool)
    if "key_padding_mask" in v:
        seen = seen & ~v["key_padding_mask"][:, None, None]
    if "attn_mask" in v:
        seen = seen & ~v["attn_mask"]
    bias = v["attn_bias"] if "attn_bias" in v else query.new_zeros(1)
    bias = bias.expand(B, H, L, S)
    if "bias_k" in v:
        key = torch.cat([key, v["bias_k"].expand(B, 1, E)], 1)
        value = torch.cat([value, v["bias_v"].expand(B, 1, E)], 1)
        seen = torch.nn.functional.pad(seen, (0, 1), value=True)
        bias = torch.nn.functional.pad(bias, (0, 1))
    split = lambda x: x.unflatten(-1, (H, -1)).transpose(0, 1)  # noqa: E731
    outputs, weights = [], []
    for b in range(B):
        options = Options(
            scale=v.get("scale"), softcap=v.get("softcap", 0.0), window=v.get("window_size"),
            masks=(seen[b].expand(H, -1, -1), bias[b]),
        )  # fmt: skip
        found = attend(*(split(x[b]) for x in (query, key, value)), options, arithmetic)
        outputs.append(found.output.transpose(0, 1).flatten(1))
        weights.append(found.weights.mean(0) if v["average"] else found.weights)
    output = torch.stack(outputs) @ v["out_proj_weight"].mT + v["out_proj_bias"]
    return output, torch.stack(weights)
