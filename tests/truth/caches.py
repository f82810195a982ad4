"""Calls of attention_with_kvcache: drawn, and the truth of them."""

import dense
import torch
from draw import Draw
from formula import attend
from packed import int8_tensor
from problems import options_of, widened


def attention_with_kvcache(seed):
    d = Draw(seed, "attention_with_kvcache")
    mood = d.start_numbers()
    B, Hkv, group = d.between(1, 4), d.between(1, 3), d.pick((1, 1, 2, 4))
    H, L, D = Hkv * group, d.pick((1, 1, 2, 5, 16, 40)), d.pick((1, 3, 8, 16, 17, 32, 64))
    Dv = D if d.chance(0.6) else d.pick((1, 3, 8, 20, 64))
    lens = [d.length() for _ in range(B)]
    if d.chance(0.3):
        lens[d.between(0, B - 1)] = 0
    new = d.pick((0, 0, L, d.between(1, 9)))
    longest = max(lens) + new
    d.tensor("query", (B, H, L, D), mood)
    room = places(d, B, lens, longest, new)
    caches(d, mood, room, Hkv, D, Dv, lens if room[0] == B else None)
    if new:
        d.tensor("key", (B, Hkv, new, D), mood)
        d.tensor("value", (B, Hkv, new, Dv), mood)
        d.keywords |= {"key": "key", "value": "value"}
    d.tensors["cache_seqlens"] = f"torch.tensor({lens}, dtype=torch.{d.pick(('int32', 'int64'))})"
    d.keywords["cache_seqlens"] = "cache_seqlens"
    options(d, B, H, L, longest)
    facts = d.function(H)
    scales = [n for n in ("k_scale", "v_scale") if n in d.tensors]
    body = ["k_after, v_after = copy.deepcopy((k_cache, v_cache))"]
    body += [f"{n}_after = copy.deepcopy({n})" for n in scales]
    for n in scales:
        d.keywords[n] = f"{n}_after"
    after = ("k_after", "v_after", *(f"{n}_after" for n in scales))
    call = dense.finish(
        d, "attention_with_kvcache",
        "(*qkv.attention_with_kvcache(query, k_after, v_after{keywords}, return_softmax_lse=True), "
        f"{', '.join(after)})",
        ("output", "lse", *after), truth, leaves=(), cotangents=(), order=0,
        needed=("key", "value", "cache_seqlens", "block_table", "k_scale", "v_scale",
                "cache_batch_idx"),
        facts=facts, setup=("import copy",), body=tuple(body), check=appended if scales else None,
    )  # fmt: skip
    return call


def places(d, B, lens, longest, new):
    """Where the rows of the batch lie; returns (rows or blocks, places in each)."""
    if d.chance(0.4):  # pages, of which no two rows share one
        size = d.pick((1, 3, 16))
        width = max(1, -(-longest // size))
        blocks = B * width + d.between(0, 3)
        order = [*range(blocks)]
        d.random.shuffle(order)
        table = [order[n * width : (n + 1) * width] for n in range(B)]
        d.tensors["block_table"] = f"torch.tensor({table}, dtype=torch.int32)"
        d.keywords["block_table"] = "block_table"
        return blocks, size
    rows = B
    if d.chance(0.3):
        rows = B + d.between(0, 2)
        index = d.random.sample(range(rows), B)
        d.tensors["cache_batch_idx"] = f"torch.tensor({index})"
        d.keywords["cache_batch_idx"] = "cache_batch_idx"
    if d.chance(0.3):
        pads = [d.between(0, n) for n in lens]
        d.tensors["cache_leftpad"] = f"torch.tensor({pads})"
        d.keywords["cache_leftpad"] = "cache_leftpad"
    return rows, longest + d.between(0, 5)


def caches(d, mood, room, Hkv, D, Dv, lens):
    """Adds k_cache and v_cache, of query's dtype, or int8 with scales."""
    int8 = d.dtype != torch.float64 and d.chance(0.35)
    for name, n in (("k_cache", D), ("v_cache", Dv)):
        shape = (room[0], Hkv, room[1], n)
        if int8:
            int8_tensor(d, name, shape, f"{name[0]}_scale", shape[:-1])
            continue
        layouts = ("plain", "transposed", "sliced")
        d.tensor(name, shape, mood, role={"k": "key", "v": "value"}[name[0]], layouts=layouts)
        if lens and "cache_batch_idx" not in d.keywords and "block_table" not in d.keywords:
            beyond = (
                f"torch.arange({room[1]})[:, None] >= torch.tensor({lens})[:, None, None, None]"
            )
            d.tensors[name] += f".masked_fill_({beyond}, math.nan)"  # nobody may read it


def options(d, B, H, L, longest):
    k = d.keywords
    for name in ("alibi_slopes", "sinks"):
        if d.chance(0.3):
            d.of_heads(name, d.pick([(H,), (B, H), (1, H)]))
    if d.chance(0.3):
        shape = d.broadcast((B, H, L, longest + d.pick((0, 2))), 1)
        d.mask("bias", (1,) * (2 - len(shape)) + shape, d.pick(("same", "f32")))
    if d.chance(0.2):
        d.spans(d.broadcast((B, H, L)) or (1,), longest)
    d.scores(L, longest)
    if "scale" in k:
        k["softmax_scale"] = k.pop("scale")
    if d.chance(0.4):
        k["causal"] = "True"


def truth(v, arithmetic):
    query = v["query"]
    B, H, L, _ = query.shape
    k_cache, v_cache = v["k_cache"], v["v_cache"]
    after = v.get("after")
    if after is None:
        after = [written(v, k_cache, v.get("key")), written(v, v_cache, v.get("value"))]
    else:
        after = [after["k_after"], after["v_after"]]
    left, right = v.get("window_size") or (-1, -1)
    v = v | {"window_size": (left, 0 if v.get("causal") else right)}
    keys, values = widened(v, *after, -3)
    outputs, lses = [], []
    for b in range(B):
        pad = int(v["cache_leftpad"][b]) if "cache_leftpad" in v else 0
        key, value = (x[places_of(v, b)][pad:].transpose(0, 1) for x in rows_of(keys, values))
        S = key.size(1)

        def share(x, own, b=b, S=S):
            if own == 1:
                return x.expand(B, H)[b]
            x = x.expand(B, H, *x.shape[-2:])[b]
            return x.expand(H, L, max(S, x.size(-1)))[..., :S]

        found = attend(query[b], key, value, options_of(v, b, H, L, S, share), arithmetic)
        outputs.append(found.output)
        lses.append(found.lse)
    scales = [v[f"{n}_scale"] for n in "kv" if f"{n}_scale" in v]
    return torch.stack(outputs), torch.stack(lses), *after, *scales


def rows_of(*caches):
    """[rows * places, Hkv, D]: with a number for each row of keys or values."""
    return [x.transpose(1, 2).flatten(0, 1) for x in caches]


def places_of(v, b):
    """The numbers of all keys of batch item b, those that were appended among them."""
    n = int(v["cache_seqlens"][b]) + (v["key"].size(2) if v.get("key") is not None else 0)
    j, size = torch.arange(n), v["k_cache"].size(2)
    if "block_table" in v:
        return v["block_table"][b].long()[j // size] * size + j % size
    row = int(v["cache_batch_idx"][b]) if "cache_batch_idx" in v else b
    return row * size + j


def written(v, cache, new):
    if new is None:
        return cache
    (flat,) = rows_of(cache)
    flat = flat.clone()
    for b in range(new.size(0)):
        flat[places_of(v, b)[-new.size(2) :]] = new[b].transpose(0, 1)
    return flat.view(cache.size(0), cache.size(2), *flat.shape[1:]).transpose(1, 2)


def appended(case, ours, fail):
    """Holds that int8 caches have been changed where rows were appended, and there by the scales:
    no number is further off than half a scale, and the row's own scale is its largest over 127."""
    v = case.values
    for cache, new in (("k", "key"), ("v", "value")):
        before, after = v[f"{cache}_cache"], ours[f"{cache}_after"]
        (was,), (now,) = rows_of(before), rows_of(after)
        untouched = torch.ones(len(was), dtype=torch.bool)
        for b in range(v[new].size(0) if new in v else 0):
            at = places_of(v, b)[-v[new].size(2) :]
            untouched[at] = False
            x = v[new][b].transpose(0, 1).double()  # [rows, Hkv, D]
            scale = scale_of(ours[f"{cache}_scale_after"].double(), before.shape, at)
            own = x.abs().amax(-1, keepdim=True) / 127
            if v[f"{cache}_scale"].dim() == 3 and ((scale - own).abs() > 1e-6 * own).any():
                fail(f"{cache}_scale_after", "a row's own scale is not its largest number / 127")
            wanted = (x / scale).nan_to_num(0.0).clamp(-127, 127)
            # Division in float32 may move a number over a half by so much.
            if ((now[at].double() - wanted).abs() > 0.5 + 1e-4).any():
                fail(f"{cache}_after", "an appended number is further off than half a scale")
        if not torch.equal(was[untouched], now[untouched]):
            fail(f"{cache}_after", "a row was changed to which nothing was appended")


def scale_of(scale, shape, at):
    """[rows, Hkv, 1]: the scale of each of the cache's rows `at`, whatever scales there are."""
    of_rows = scale[..., None] if scale.dim() == 3 else scale.view(-1, 1, 1)
    return rows_of(of_rows.expand(*shape[:3], 1))[0][at]
