"""Draws calls of varlen_attn: documents in one tensor, with gaps, without keys, in pages."""

import dense
import problems
import torch
from draw import SUFFIX, Draw

PIECES = ("query", "key", "value")
BLOCK = (1, 3, 4, 16)


def lengths(d, documents, most):
    """Queries or keys of each document. None in some, several in a row and at either end too."""
    some = [d.length(most) for _ in range(documents)]
    if d.chance(0.5) and documents > 1:
        begin = d.pick((0, documents - 1, d.between(0, documents - 1)))
        for n in range(begin, min(documents, begin + d.pick((1, 1, 2, 3)))):
            some[n] = 0
    return some


def both_lengths(d):
    """(queries, keys) of each document."""
    documents = d.between(1, 6)
    if d.chance(0.03):  # above the thresholds at which threads share documents
        sizes = d.pick([(512, 512), (512, 8, 512), (512, 3), (3, 512, 512)])
        return [*sizes], [n if n == 512 else d.pick((0, n)) for n in sizes]
    most = d.pick((5, 20, 40, 150))
    queries = lengths(d, documents, most)
    relation = d.pick({"alike": 3, "any": 4, "one to three": 2, "more": 1, "fewer": 1})
    keys = {
        "alike": lambda: [*queries],
        "any": lambda: lengths(d, documents, most),
        "one to three": lambda: [d.between(1, 3) for _ in queries],
        "more": lambda: [n + d.between(0, 9) for n in queries],
        "fewer": lambda: [max(0, n - d.between(0, 9)) for n in queries],
    }[relation]()
    if relation != "alike" and d.chance(0.5):  # no keys: at either end, between, several in a row
        begin = d.pick((0, documents - 1, d.between(0, documents - 1)))
        for n in range(begin, min(documents, begin + d.pick((1, 1, 2)))):
            keys[n] = 0
    if 1 <= max(keys) <= 3:
        d.tags.append("few keys")
    return queries, keys


def ends(d, name, sizes, gap):
    """Adds cumulative lengths, beginning at `gap`; returns where the last one ends."""
    found = [gap]
    for n in sizes:
        found.append(found[-1] + n)
    d.tensors[name] = f"torch.tensor({found}, dtype=torch.{d.pick(('int32', 'int64'))})"
    return found[-1]


def heads(d):
    Hkv, group = d.between(1, 3), d.pick((1, 1, 2, 3))
    if group > 1:
        d.keywords["enable_gqa"] = "True"
    D = d.pick((1, 3, 8, 16, 17, 32, 64))
    return Hkv * group, Hkv, D, D if d.chance(0.6) else d.pick((1, 3, 8, 20, 64))


def options(d, queries, keys, H, *, soft=True):
    N, L, S = len(queries), max(queries), max(keys)
    for name in ("alibi_slopes", "sinks"):
        if d.chance(0.35):
            d.of_heads(name, d.pick([(H,), (N, H), (1, H), (N, 1)]))
    if d.chance(0.5):
        more = d.pick((0, 0, 2))
        shape = d.broadcast((N, H, L + more, S + more), 0 if d.chance(0.2) else 2)
        if d.chance(0.4):  # one for all documents, or all heads too: its gradient is their sum
            shape = (1, d.pick((1, 1, H)), *shape[-2:]) if len(shape) > 2 else shape
        shape = (1,) * (2 - len(shape)) + shape
        d.mask("bias", shape, d.pick(("same", "f32")))
    if d.chance(0.2):
        d.spans(d.broadcast((N, H, L + d.pick((0, 0, 2)))) or (1,), S)
    d.scores(L, S)
    if soft:
        d.dropout()


def varlen_attn(seed):
    d = Draw(seed, "varlen_attn")
    mood = d.start_numbers()
    queries, keys = both_lengths(d)
    H, Hkv, D, Dv = heads(d)
    gaps = d.pick((0, 0, 2)), d.pick((0, 0, 3))
    T = ends(d, "cu_seq_q", queries, gaps[0]) + d.pick((0, 0, 0, 4))
    shared = queries == keys and d.chance(0.5)
    if shared:
        Tk = T
    else:
        used = d.chance(0.3)  # room for more keys in each document than take part
        rooms = [n + d.between(0, 4) for n in keys] if used else keys
        Tk = ends(d, "cu_seq_k", rooms, gaps[1]) + d.pick((0, 0, 0, 4))
        if used:
            d.tensors["seqused_k"] = f"torch.tensor({keys})"
            d.keywords["seqused_k"] = "seqused_k"
    for name, shape in zip(PIECES, [(T, H, D), (Tk, Hkv, D), (Tk, Hkv, Dv)], strict=True):
        d.tensor(name, shape, mood)
    options(d, queries, keys, H)
    facts = d.function(H)
    cu_k = "None" if shared else "cu_seq_k"
    form = (
        f"qkv.varlen_attn(query, key, value, cu_seq_q, {cu_k}, {max(queries)}, {max(keys)}"
        "{keywords}, return_aux=AuxRequest(lse=True))"
    )
    return dense.finish(
        d, "varlen_attn", form, ("output", "lse"), problems.varlen_attn,
        leaves=(*dense.LEAVES, "table"),
        cotangents=d.pick([("output", "lse"), ("output",), ("lse",)]),
        order=d.order(), needed=("seqused_k",), facts=facts,
    )  # fmt: skip


def paged(seed):
    """Keys and values in blocks, which documents may share, of the query's dtype or int8."""
    d = Draw(seed, "paged")
    mood = d.start_numbers()
    queries, keys = both_lengths(d)
    H, Hkv, D, Dv = heads(d)
    T = ends(d, "cu_seq_q", queries, d.pick((0, 0, 2))) + d.pick((0, 0, 4))
    size = d.pick(BLOCK)
    width = max(1, max(-(-n // size) for n in keys))
    blocks = width + d.between(0, 20)
    generator = f"generator=torch.Generator().manual_seed({d.seed()})"
    d.tensors["block_table"] = f"torch.randint({blocks}, ({len(keys)}, {width}), {generator})"
    d.tensors["seqused_k"] = f"torch.tensor({keys}, dtype=torch.int32)"
    d.keywords |= {"block_table": "block_table", "seqused_k": "seqused_k"}
    d.tensor("query", (T, H, D), mood)
    int8 = d.dtype != torch.float64 and d.chance(0.3)
    for name, n in (("key", D), ("value", Dv)):
        shape = (blocks, size, Hkv, n)
        if int8:
            int8_tensor(d, name, shape, f"{name[0]}_scale", shape[:-1])
        else:
            d.tensor(name, shape, mood)
    options(d, queries, keys, H, soft=False)
    facts = d.function(H)
    form = (
        f"qkv.varlen_attn(query, key, value, cu_seq_q, None, {max(queries)}, {max(keys)}"
        "{keywords}, return_aux=AuxRequest(lse=True))"
    )
    return dense.finish(
        d, "paged", form, ("output", "lse"), problems.varlen_attn, leaves=(), cotangents=(),
        order=0, needed=("block_table", "seqused_k", "k_scale", "v_scale"), facts=facts,
    )  # fmt: skip


def int8_tensor(d, name, shape, scale, rows):
    """Adds an int8 tensor and its scales: of all, of heads, or of rows."""
    sizes = ", ".join(map(str, (d.seed(), *shape)))
    d.tensors[name] = f"(normal({sizes}) * 50).round().clamp(-127, 127).to(torch.int8)"
    heads = shape[2] if name in ("key", "value") else shape[1]
    kind = d.pick([(), (1,), (heads,), rows])
    text = f"(normal({', '.join(map(str, (d.seed(), *kind)))}).abs() / 40 + 0.01)"
    d.tensors[scale] = text + SUFFIX[torch.float32]
    d.keywords[scale] = scale
