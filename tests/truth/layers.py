"""Calls of the layers in qkv.nn but torch's own: drawn, and the truth of them."""

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
    scores = arithmetic.tanh(hidden) @ v["v"]
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
        if S := key.size(1):
            centre = v["position"].detach().sum(-2, keepdim=True) / S
            query, key = query - centre, key - centre
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
