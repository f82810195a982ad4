"""Draws calls of the operators on dense tensors: attention, its weights, its hard form, jvp."""

import problems
import torch
from case import compute_dtype
from draw import Draw

from call import Call

PIECES = ("query", "key", "value")


def shapes(d):
    """(lead [..., H], shapes of query, key and value)."""
    while True:
        batch = d.pick({(): 3, (1,): 3, (2,): 4, (3,): 2, (2, 2): 1, (0,): 0.2})
        Hkv, group = d.between(1, 3), d.pick((1, 1, 2, 3))
        L, S = d.length(), d.length()
        if d.chance(0.05):  # many keys: with several strips of rows, planes take turns
            L, S = d.pick((100, 512)), 512
        if d.chance(0.3):
            S = d.between(1, 3)  # one to three keys: no weight is far from 0 or 1
        D, Dv = d.pick((1, 2, 3, 8, 16, 17, 32, 64)), d.pick((1, 3, 8, 16, 20, 64))
        if d.chance(0.5):
            Dv = D
        H = Hkv * group
        if d.grow((*batch, H, L, S, max(D, Dv)), 12_000_000 if S == 512 else 2_000_000):
            break
    leads = [batch + (n,) for n in (H, Hkv, Hkv)]
    if group > 1:
        d.keywords["enable_gqa"] = "True"
        leads = [(*d.broadcast(x[:-1]), x[-1]) if d.chance(0.3) else x for x in leads]
        batch = torch.broadcast_shapes(*(x[:-1] for x in leads))
    elif d.chance(0.3):
        leads = [(*d.broadcast(x),) or (1,) for x in leads]
        batch = torch.broadcast_shapes(*leads)[:-1]
        H = torch.broadcast_shapes(*leads)[-1]
    lead = (*batch, H)
    return lead, (leads[0] + (L, D), leads[1] + (S, D), leads[2] + (S, Dv))


def options(d, lead, L, S, *, soft=True):
    if d.chance(0.5):
        d.mask("attn_mask", mask_shape(d, lead, L, S), d.pick(("bool", "same", "f32")))
    if d.chance(0.35):
        d.mask("bias", mask_shape(d, lead, L, S), d.pick(("same", "f32")))
    if d.chance(0.2):
        d.spans(d.broadcast((*lead, L)) or (1,), S)
    if d.chance(0.3):
        d.keywords["is_causal"] = "True"
    if d.chance(0.3):
        d.of_heads("alibi_slopes", d.broadcast(lead) or (1,))
    if soft and d.chance(0.35):
        d.of_heads("sinks", d.broadcast(lead) or (1,))
    d.scores(L, S)
    if soft:
        d.dropout()


def chosen(d, lead, L, S, key_heads, rank):
    """Draws indices of keys; half the time without what keeps attention from reading only these."""
    if rank != len(lead) + 2 or 0 in (*lead, L, S) or not d.chance(0.25):
        return
    rows = (*lead[:-1], *d.pick(((), (), (1,), (key_heads,))), L)
    d.indices((*rows, d.between(1, max(1, S // 8))), S)
    if d.chance(0.6):
        for name in ("attn_mask", "bias", "spans", "alibi_slopes", "dropout_p"):
            d.keywords.pop(name, None)
            d.tensors.pop(name, None)


def mask_shape(d, lead, L, S):
    shape = d.broadcast((*lead, L, S))
    return (1,) * (2 - len(shape)) + shape


def floating(d, names):
    return [n for n in names if n in d.tensors and ">" not in d.tensors[n].split("masked_fill")[0]]


def drawn(seed, operator, pieces=PIECES, soft=True):
    """(Draw with inputs and options, lead, L, S)."""
    d = Draw(seed, operator)
    mood = d.start_numbers()
    lead, sizes = shapes(d)
    for name, shape in zip(PIECES, sizes, strict=True):
        if name in pieces:
            d.tensor(name, shape, mood)
    L, S = sizes[0][-2], sizes[1][-2]
    if "value" not in pieces:
        used = [x[:-2] for x in sizes[:2]]
        if "enable_gqa" in d.keywords:
            lead = (*torch.broadcast_shapes(*(x[:-1] for x in used)), lead[-1])
        else:
            lead = torch.broadcast_shapes(*used)
    options(d, lead, L, S, soft=soft)
    d.tags.append("few keys" if 1 <= S <= 3 else "keys")
    return d, lead, L, S, sizes


def finish(d, operator, form, results, truth, *, leaves, cotangents, order, **more):
    facts = {"manual_seed": d.seed() % 1000} | more.pop("facts", {})
    return Call(
        operator, form, results, truth, tensors=d.tensors, keywords=d.keywords,
        leaves=tuple(floating(d, leaves)) if order else (), cotangents=cotangents, order=order,
        facts=facts, tags=tuple(d.tags), dtype=d.dtype, **more,
    )  # fmt: skip


LEAVES = (*PIECES, "attn_mask", "bias", "alibi_slopes", "sinks")


def attention(seed):
    d, lead, L, S, sizes = drawn(seed, "attention")
    chosen(d, lead, L, S, sizes[1][-3] if len(sizes[1]) > 2 else 1, len(sizes[0]))
    if "sinks" in d.keywords and d.chance(0.1):
        d.tensors["sinks"] = d.tensors["sinks"].replace("(normal", "math.nan * (normal", 1)
        order = 0
    else:
        order = d.order()
    return finish(
        d, "attention", "qkv.attention(query, key, value{keywords}, return_lse=True)",
        ("output", "lse"), problems.attention, leaves=LEAVES, cotangents=d.pick(
            [("output", "lse"), ("output",), ("lse",), ("output", "lse")]), order=order,
    )  # fmt: skip


def flex_attention(seed):
    """4-D tensors, with options and mostly a function."""
    d = Draw(seed, "flex_attention")
    mood = d.start_numbers()
    B, Hkv, group = d.between(1, 3), d.between(1, 3), d.pick((1, 1, 2, 3))
    H, L, S = Hkv * group, d.length(150), d.length(150)
    if group > 1:
        d.keywords["enable_gqa"] = "True"
    D, Dv = d.pick((1, 3, 8, 17, 32)), d.pick((1, 3, 8, 20))
    for name, shape in zip(PIECES, [(B, H, L, D), (B, Hkv, S, D), (B, Hkv, S, Dv)], strict=True):
        d.tensor(name, shape, mood)
    options(d, (B, H), L, S)
    facts = d.function(H)
    return finish(
        d, "flex_attention", "qkv.flex_attention(query, key, value{keywords}, return_lse=True)",
        ("output", "lse"), problems.attention, leaves=(*LEAVES, "table"),
        cotangents=d.pick([("output", "lse"), ("output",), ("lse",)]), order=d.order(),
        facts=facts,
    )  # fmt: skip


def reduce(d):
    how = d.pick((None, "heads", "queries"))
    if how:
        d.keywords["reduce"] = repr(how)


def attention_weights(seed):
    d, *_ = drawn(seed, "attention_weights", PIECES[:2])
    reduce(d)
    return finish(
        d, "attention_weights", "qkv.attention_weights(query, key{keywords})",
        ("weights",), problems.attention_weights, leaves=LEAVES, cotangents=("weights",),
        order=d.order(0.2), needed=("reduce",), composed=True,
    )  # fmt: skip


def attention_with_weights(seed):
    d, *_ = drawn(seed, "attention_with_weights")
    reduce(d)
    return finish(
        d, "attention_with_weights", "qkv.attention_with_weights(query, key, value{keywords})",
        ("output", "weights"), problems.attention_with_weights, leaves=LEAVES,
        cotangents=("output", "weights"), order=d.order(0.2), needed=("reduce",), composed=True,
    )  # fmt: skip


def hard_attention(seed):
    d, *_ = drawn(seed, "hard_attention", soft=False)
    if d.chance(0.5):
        d.keywords["straight_through"] = "True"
    return finish(
        d, "hard_attention",
        "qkv.hard_attention(query, key, value{keywords}, return_index=True)",
        ("output", "index"), problems.hard_attention, leaves=LEAVES, cotangents=("output",),
        order=min(1, d.order()),
    )  # fmt: skip


def attention_jvp(seed):
    """The results are the function's own tangents, whose gradients are second derivatives."""
    d, lead, L, S, sizes = drawn(seed, "attention_jvp")
    # A gradient through this function is the sum of two, each rounded to the dtype of its tensor,
    # and of numbers of heads they may cancel: these are of the dtype that is computed in.
    for name in {"alibi_slopes", "sinks"} & d.tensors.keys():
        d.tensors[name] = f"({d.tensors[name]}).to({compute_dtype(d.dtype)})"
    names = floating(d, LEAVES)
    for name in names:
        if d.chance(0.7):
            generator = f"generator=torch.Generator().manual_seed({d.seed()})"
            text = f"torch.randn({name}.shape, {generator}).to({name}.dtype)"
            d.tensors[f"{name}_tangent"] = text
            d.keywords[f"{name}_tangent"] = f"{name}_tangent"
    tangents = tuple(f"{n}_tangent" for n in names if f"{n}_tangent" in d.tensors)
    results = ("output", "lse", "output_tangent", "lse_tangent")
    return finish(
        d, "attention_jvp", "qkv.attention_jvp(query, key, value{keywords})", results,
        problems.attention_jvp, leaves=LEAVES + tangents, cotangents=results,
        order=min(1, d.order()),
    )  # fmt: skip
