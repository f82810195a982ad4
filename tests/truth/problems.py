"""Calls cut into problems of formula.py: dense ones with their batch, and packed documents.

Each function takes the call's arguments by name, `v`, tensors in the dtype to compute in, and the
arithmetic; it returns the results as qkv returns them.
"""

import math

import torch
from derivatives import grad
from formula import Options, attend

from qkv.testing import _dropout


def kept(v, item, H, L, S):
    """What dropout keeps of the weights of one batch item, from the seed that the call draws."""
    p = v.get("dropout_p", 0.0)
    if not p:
        return None
    torch.manual_seed(v["manual_seed"])
    seed = _dropout.dropout_seed()
    return _dropout.dropout_mask(seed, p, (H, L, S), place=_dropout.Place(first_item=item))


def in_spans(spans, S):
    """bool [..., L, S]: whether one of a query's spans has the key. Spans: [..., L, 2 n]."""
    begins, ends = spans[..., ::2, None], spans[..., 1::2, None]
    return ((begins <= torch.arange(S)) & (torch.arange(S) < ends)).any(-2)


def among_indices(v, H, S):
    """bool [..., 1 or H, L, S]: whether a key is among those that are chosen for a query."""
    indices = (
        v["indices"] if v["indices"].dim() == v["query"].dim() else v["indices"][..., None, :, :]
    )
    found = (indices[..., None] == torch.arange(S)).any(-2)
    return found if found.size(-3) == 1 else found.repeat_interleave(H // found.size(-3), -3)


def function_of(v, item, H, L, S):
    """The call's score_mod, of all scores of an item at once, with the tables of v."""
    if v.get("score_mod") is None:
        return None
    names = {"torch": torch, "math": math, "table": v.get("table")}
    function = eval(v["function"], names)
    first = S - L if "block_table" in v or "k_cache" in v else 0
    h, q, k = torch.arange(H)[:, None, None], first + torch.arange(L)[:, None], torch.arange(S)

    def run(scores):
        default = torch.get_default_dtype()  # of what an integer and a number of Python make
        torch.set_default_dtype(scores.dtype)
        try:
            return function(scores, torch.tensor(item), h, q, k).expand(H, L, S)
        finally:
            torch.set_default_dtype(default)

    return run


def options_of(v, item, H, L, S, of_item):
    """Options of one batch item; of_item(x, n) is its share of x, of which the last n dimensions
    are its own."""
    masks = [of_item(v[name], 3) for name in ("attn_mask", "bias") if v.get(name) is not None]
    if v.get("spans") is not None:
        masks.append(of_item(in_spans(v["spans"], S), 3))
    if v.get("indices") is not None:
        masks.append(of_item(among_indices(v, H, S), 3))
    heads = {n: of_item(v[n], 1) for n in ("alibi_slopes", "sinks") if v.get(n) is not None}
    scale = v.get("scale", v.get("softmax_scale"))
    return Options(
        scale=scale, softcap=v.get("softcap", 0.0), is_causal=v.get("is_causal", False),
        window=v.get("window_size"), masks=tuple(masks), slopes=heads.get("alibi_slopes"),
        sinks=heads.get("sinks"), kept=kept(v, item, H, L, S), dropout_p=v.get("dropout_p", 0.0),
        function=function_of(v, item, H, L, S),
    )  # fmt: skip


# --- dense --------------------------------------------------------------------------------------


def items(v):
    """The batch's sizes, and an iterator of (query, key, value or None, Options) of each item."""
    inputs = [v[n] for n in ("query", "key", "value") if v.get(n) is not None]
    gqa = v.get("enable_gqa", False)
    batch = torch.broadcast_shapes(*(x.shape[:-3] for x in inputs))
    if not gqa:
        H = torch.broadcast_shapes(*(x.shape[-3:-2] for x in inputs))[0]
        inputs = [x.expand(*x.shape[:-3], H, *x.shape[-2:]) for x in inputs]
    H, L = inputs[0].shape[-3:-1]
    S = inputs[1].size(-2)
    flat = [
        x.expand(*batch, *x.shape[-3:]).reshape(math.prod(batch), *x.shape[-3:]) for x in inputs
    ]

    def of_item(n):
        def share(x, own):
            shape = (H, L, S) if own == 3 else (H,)
            return x.expand(*batch, *shape).reshape(math.prod(batch), *shape)[n]

        return share

    def each():
        for n in range(math.prod(batch)):
            query, key, *value = (x[n] for x in flat)
            yield query, key, *(value or [None]), options_of(v, n, H, L, S, of_item(n))

    widths = [x.size(-1) for x in inputs]
    return (*batch, H, L, S, widths[-1]), each()


def stacked(parts, shape, like):
    return torch.stack(parts).reshape(shape) if parts else like.new_zeros(shape)


def dense(v, arithmetic):
    """{"output", "lse", "weights", "scores"} of the whole batch."""
    (*lead, L, S, width), each = items(v)
    found = [attend(*item, arithmetic) for item in each]
    shapes = {"output": (L, width), "lse": (L,), "weights": (L, S), "scores": (L, S)}
    return {
        name: stacked([getattr(x, name) for x in found], (*lead, *shape), v["query"])
        for name, shape in shapes.items()
        if name != "output" or v.get("value") is not None
    }


def attention(v, arithmetic):
    found = dense(v, arithmetic)
    return found["output"], found["lse"]


def reduced(weights, reduce):
    return {
        None: lambda: weights, "heads": lambda: weights.mean(-3), "queries": lambda: weights.sum(-2)
    }[reduce]()  # fmt: skip


def attention_weights(v, arithmetic):
    return (reduced(dense(v, arithmetic)["weights"], v.get("reduce")),)


def attention_with_weights(v, arithmetic):
    found = dense(v, arithmetic)
    return found["output"], reduced(found["weights"], v.get("reduce"))


def hard_attention(v, arithmetic):
    """The output for the keys that the call has chosen, v["chosen"], and the scores, by which
    calls.py judges the choice."""
    found = dense(v, arithmetic)
    chosen, value = v["chosen"], v["value"]
    H = chosen.size(-2)
    if value.size(-3) != H:
        value = value.repeat_interleave(H // value.size(-3), -3)
    value = value.expand(*chosen.shape[:-1], *value.shape[-2:])
    index = chosen.clamp(min=0)[..., None].expand(*chosen.shape, value.size(-1))
    if value.size(-2) == 0:
        output = value.new_zeros(index.shape)
    else:
        output = value.gather(-2, index).masked_fill(chosen[..., None] < 0, 0)
    output = arithmetic.scores(output)
    if v.get("straight_through"):
        soft = dense(v | {"value": v["value"].detach()}, arithmetic)["output"]
        output = output + soft - soft.detach()
    return output, found["scores"].detach()


# --- forward mode -------------------------------------------------------------------------------

TANGENTS = ("query", "key", "value", "attn_mask", "alibi_slopes", "bias", "sinks")


def attention_jvp(v, arithmetic):
    """The tangents are the gradients, with respect to u, of the gradients of <u, results>."""
    names = [n for n in TANGENTS if v.get(f"{n}_tangent") is not None]
    if not names:
        results = attention(v, arithmetic)
        return *results, *map(torch.zeros_like, results)
    with torch.enable_grad():
        inputs = {n: v[n].clone() if v[n].requires_grad else v[n].requires_grad_() for n in names}
        results = attention(v | inputs, arithmetic)
        dummies = [torch.zeros_like(x).requires_grad_() for x in results]
        gradients = grad(results, [*inputs.values()], dummies, create_graph=True)
        directions = [v[f"{n}_tangent"] for n in names]
        return *results, *grad(gradients, dummies, directions, create_graph=True)


# --- packed documents ---------------------------------------------------------------------------


def widened(v, key, value, heads):
    """int8 [..., D] times its scales, where there are any. heads: the dimension of the heads, from
    the end."""
    found = []
    for x, scale in ((key, v.get("k_scale")), (value, v.get("v_scale"))):
        if scale is not None:
            of_rows = scale[..., None] if scale.dim() > 1 else scale.view(-1, *[1] * (-heads - 1))
            x = x.to(scale.dtype) * of_rows
        found.append(x)
    return found


def documents(v):
    """(n, queries of document n, its key and value [S, Hkv, D]) for each document."""
    ends_q = v["cu_seq_q"].tolist()
    ends_k = ends_q if v.get("cu_seq_k") is None else v["cu_seq_k"].tolist()
    used, table = v.get("seqused_k"), v.get("block_table")
    keys, values = widened(v, v["key"], v["value"], -2)
    for n in range(len(ends_q) - 1):
        if table is not None:
            rows = torch.arange(int(used[n]))
            size = v["key"].size(1)
            places = table[n].long()[rows // size] * size + rows % size
            key, value = (x.flatten(0, 1)[places] for x in (keys, values))
        else:
            end = ends_k[n + 1] if used is None else ends_k[n] + int(used[n])
            key, value = (x[ends_k[n] : end] for x in (keys, values))
        yield n, slice(ends_q[n], ends_q[n + 1]), key, value


def varlen_attn(v, arithmetic):
    query, N = v["query"], v["cu_seq_q"].numel() - 1
    T, H, _ = query.shape
    outputs = query.new_zeros(T, H, v["value"].size(-1))
    lses = query.new_full((H, T), -math.inf)
    for n, rows, key, value in documents(v):
        L, S = rows.stop - rows.start, key.size(0)

        def share(x, own, n=n, L=L, S=S):
            if own == 1:
                return x.expand(N, H)[n]
            x = x.expand(*[N, H][: max(0, 4 - x.dim())], *x.shape) if x.dim() < 4 else x
            x = x.expand(N, H, *x.shape[-2:])[n]
            x = x.expand(H, max(L, x.size(-2)), max(S, x.size(-1)))
            return x[:, :L, :S]

        options = options_of(v, n, H, L, S, share)
        inputs = (x.transpose(0, 1) for x in (query[rows], key, value))
        found = attend(*inputs, options, arithmetic)
        outputs = torch.cat(
            [outputs[: rows.start], found.output.transpose(0, 1), outputs[rows.stop :]]
        )
        lses = torch.cat([lses[:, : rows.start], found.lse, lses[:, rows.stop :]], 1)
    return outputs, lses
