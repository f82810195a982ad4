"""Calls of the layers in qkv.nn, and of merge: drawn, and the truth of them."""

import dense
import torch
from draw import SUFFIX, Draw
from formula import PLAIN, Options, attend
from problems import kept


def parameter(d, name, *shape):
    sizes = ", ".join(map(str, (d.seed(), *shape)))
    d.tensors[name] = f"(normal({sizes}) / {max(1, shape[-1]) ** 0.5:.3g}){SUFFIX[d.dtype]}"
    return name


def batch(d, *most):
    """Batch sizes, queries, keys: small, since a layer is many operations."""
    return d.pick([(1,), (2,), (3,)]), d.between(0, most[0]), d.between(0, most[1])


# --- merge --------------------------------------------------------------------------------------


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


# --- torch's layer ------------------------------------------------------------------------------


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
    dtype = str(d.dtype)
    return dense.finish(
        d, "nn.MultiheadAttention", form, ("output", "weights"), true_multihead,
        leaves=("query", "key", "value", *named, "attn_bias"), cotangents=("output", "weights"),
        order=d.order(0.2), facts=extra | {"heads": H, "average": average == "True"},
        setup=(
            f"layer = qkv.nn.MultiheadAttention({E}, {H}, batch_first=True{constructor})"
            f".to({dtype})",
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


# --- other layers -------------------------------------------------------------------------------


def additive(seed):
    d = Draw(seed, "nn.AdditiveAttention")
    (B,), L, S = batch(d, 20, 20)
    Dq, Dk, hidden, Dv = (d.pick((1, 3, 8)) for _ in range(4))
    for name, shape in (("query", (B, L, Dq)), ("key", (B, S, Dk)), ("value", (B, S, Dv))):
        d.tensor(name, shape)
    parameter(d, "query_weight", hidden, Dq)
    parameter(d, "key_weight", hidden, Dk)
    parameter(d, "v", hidden)
    if d.chance(0.5):
        d.mask("attn_mask", d.broadcast((B, L, S), 2), d.pick(("bool", "same")))
    form = (
        'torch.func.functional_call(layer, {"query_proj.weight": query_weight, '
        '"key_proj.weight": key_weight, "v": v}, (query, key, value), '
        "dict(need_weights=True{keywords}))"
    )
    return dense.finish(
        d, "nn.AdditiveAttention", form, ("output", "weights"), true_additive,
        leaves=("query", "key", "value", "query_weight", "key_weight", "v", "attn_mask"),
        cotangents=("output", "weights"), order=d.order(0.2), torchs=True,
        setup=(f"layer = qkv.nn.AdditiveAttention({Dq}, {Dk}, {hidden}).to({d.dtype})",),
    )  # fmt: skip


def true_additive(v, arithmetic):
    """The batch takes the place of the heads."""
    hidden = (v["query"] @ v["query_weight"].mT)[:, :, None] + (v["key"] @ v["key_weight"].mT)[
        :, None
    ]
    scores = hidden.tanh() @ v["v"]
    masks = (scores,) if v.get("attn_mask") is None else (scores, v["attn_mask"])
    B, L, S = scores.shape
    query, key = scores.new_zeros(B, L, 1), scores.new_zeros(B, S, 1)
    options = Options(masks=masks, kept=kept(v, 0, B, L, S), dropout_p=v.get("dropout_p", 0.0))
    found = attend(query, key, v["value"], options, arithmetic)
    return found.output, found.weights


def smoothing(seed):
    d = Draw(seed, "nn.GaussianSmoothing")
    (B,), L, S = batch(d, 20, 40)
    P, Dv = d.pick((1, 2)), d.pick((1, 3))
    d.tensor("value", (B, S, Dv))
    d.tensor("position", (B, S, P), dtype=torch.float64)
    d.tensor("query_position", (B, L, P), dtype=torch.float64)
    d.tensors["log_sigma"] = f"normal({d.seed()})"
    if d.chance(0.5):
        d.mask("attn_mask", d.broadcast((B, L, S), 2), "bool")
    form = (
        'torch.func.functional_call(layer, {"log_sigma": log_sigma}, '
        "(value, position, query_position), dict(need_weights=True{keywords}))"
    )
    return dense.finish(
        d, "nn.GaussianSmoothing", form, ("output", "weights"), true_smoothing,
        leaves=("value", "position", "query_position", "log_sigma"),
        cotangents=("output", "weights"), order=d.order(0.2), torchs=True,
        setup=("layer = qkv.nn.GaussianSmoothing(1.0, trainable=True)",),
    )  # fmt: skip


def true_smoothing(v, arithmetic):
    query, key, sigma = v["query_position"], v["position"], v["log_sigma"].exp()
    scores = -(query[:, :, None] - key[:, None]).square().sum(-1) / (2 * sigma.square())
    if arithmetic is not PLAIN:  # the layer's own way, which loses digits of positions far apart
        key = torch.cat([key, key.square().sum(-1, keepdim=True) / -2], -1)
        query = torch.cat([query, torch.ones_like(query[..., :1])], -1) / sigma.square()
        scores = arithmetic.scores(arithmetic.dots(query, key))
    masks = (scores,) if v.get("attn_mask") is None else (scores, v["attn_mask"])
    B, L, S = scores.shape
    query, key = scores.new_zeros(B, L, 1), scores.new_zeros(B, S, 1)
    found = attend(query, key, v["value"], Options(masks=masks), arithmetic)
    return found.output, found.weights


def dictionary(seed):
    d = Draw(seed, "nn.SoftDictionary")
    mood = d.start_numbers()
    N, L, D, Dv = d.between(1, 20), d.length(40), d.pick((1, 3, 16)), d.pick((1, 3, 16))
    scale = d.pick((None, 0.5, 5.0))
    d.tensor("query", (2, L, D), mood)
    d.tensor("keys", (N, D), mood, role="key")
    d.tensor("values", (N, Dv), mood, role="value")
    form = (
        'torch.func.functional_call(layer, {"keys": keys, "values": values}, (query,), '
        "dict(need_weights=True))"
    )
    dtype = f"dtype={d.dtype}"
    return dense.finish(
        d, "nn.SoftDictionary", form, ("output", "weights"), true_dictionary,
        leaves=("query", "keys", "values"), cotangents=("output", "weights"), order=d.order(0.2),
        facts={"scale": scale}, composed=True,
        setup=(
            f"layer = qkv.nn.SoftDictionary(torch.zeros({N}, {D}, {dtype}), "
            f"torch.zeros({N}, {Dv}, {dtype}), scale={scale}, trainable=True)",
        ),
    )  # fmt: skip


def true_dictionary(v, arithmetic):
    shape = v["query"].shape
    query = v["query"].reshape(1, -1, shape[-1])
    found = attend(query, v["keys"][None], v["values"][None], Options(scale=v["scale"]), arithmetic)
    return found.output[0].unflatten(0, shape[:-1]), found.weights[0].unflatten(0, shape[:-1])
