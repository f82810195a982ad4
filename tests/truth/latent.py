"""Calls of latent_attention, with a cache or without, and the truth of them: attention to expanded
keys and values."""

import caches
import dense
import problems
import torch
from draw import SUFFIX, Draw

LEAVES = ("query_nope", "query_rope", "latents", "rope_keys", "key_weight", "value_weight")


def latent_attention(seed):
    d, mood = drawn(seed, "latent_attention")
    lead = (*d.pick({(): 3, (1,): 3, (2,): 4, (2, 2): 1}), d.between(1, 5))
    L, S = d.length(), d.length()
    C, R = queries(d, mood, lead, L)
    one = (*lead[:-1], 1, S)
    if d.chance(0.3):
        d.tensor("latents", (*one, C + R), mood, role="key")
        rope_keys = "None"
    else:
        d.tensor("latents", (*one, C), mood, role="key")
        d.tensor("rope_keys", (*one, R), mood, role="key")
        rope_keys = "rope_keys"
    dense.options(d, lead, L, S)
    d.keywords["absorb"] = d.pick(("True", "False", "None"))
    form = (
        f"qkv.latent_attention(query_nope, query_rope, latents, {rope_keys}, key_weight, "
        "value_weight{keywords}, return_lse=True)"
    )
    return dense.finish(
        d, "latent_attention", form, ("output", "lse"), truth, leaves=(*LEAVES, *dense.LEAVES[3:]),
        cotangents=d.pick([("output", "lse"), ("output",), ("lse",)]), order=d.order(),
        needed=("absorb",), torchs=True, composed=True,
    )  # fmt: skip


def latent_attention_with_kvcache(seed):
    """Of the dtype of the query; int8 ones are test_latent_cache's."""
    d, mood = drawn(seed, "latent_attention_with_kvcache")
    B, H, L, new = d.between(1, 3), d.between(1, 5), d.pick((1, 1, 2, 5, 16)), d.pick((0, 1, 6))
    C, R = queries(d, mood, (B, H), L)
    lens = [d.length() for _ in range(B)]
    longest = max(lens) + new
    rows, size = caches.places(d, B, lens, longest, new)
    d.tensor("cache", (rows, 1, size, C + R), mood, role="key")
    if new:
        d.tensor("latents", (B, 1, new, C), mood, role="key")
        d.tensor("rope_keys", (B, 1, new, R), mood, role="key")
        d.keywords |= {"latents": "latents", "rope_keys": "rope_keys"}
    d.tensors["cache_seqlens"] = f"torch.tensor({lens})"
    d.keywords |= {"cache_seqlens": "cache_seqlens", "absorb": d.pick(("True", "False", "None"))}
    caches.options(d, B, H, L, longest)
    return dense.finish(
        d, "latent_attention_with_kvcache",
        "(*qkv.latent_attention_with_kvcache(query_nope, query_rope, cache_after, key_weight, "
        "value_weight{keywords}, return_softmax_lse=True), cache_after)",
        ("output", "lse", "cache_after"), truth_of_cache, leaves=(), cotangents=(), order=0,
        needed=("latents", "rope_keys", "cache_seqlens", "block_table", "cache_batch_idx",
                "absorb"),
        body=("cache_after = cache.clone()",), torchs=True,
    )  # fmt: skip


def drawn(seed, operator):
    d = Draw(seed, operator)
    mood = d.start_numbers()
    if d.dtype == torch.float16 and mood in ("mean", "offset", "scores"):
        mood = "ordinary"  # projections are float16 themselves: theirs would pass its 65504
    return d, mood


def queries(d, mood, lead, L):
    """Adds queries and weights; returns C and R."""
    N, R, C, Dv = (d.pick(x) for x in ((1, 3, 8, 32), (0, 1, 4, 16), (1, 3, 8, 40), (1, 8, 20)))
    d.tensor("query_nope", (*lead, L, N), mood, role="query")
    d.tensor("query_rope", (*lead, L, R), mood, role="query")
    for name, rows in (("key_weight", N), ("value_weight", Dv)):
        sizes = ", ".join(map(str, (d.seed(), lead[-1], rows, C)))
        d.tensors[name] = f"(normal({sizes}) / {C**0.5:.3g}){SUFFIX[d.dtype]}"
    return C, R


def truth(v, arithmetic):
    rows = v["latents"]
    if "rope_keys" in v:
        rows = torch.cat([rows, v["rope_keys"]], -1)
    heads, finish = of_heads(v, rows, arithmetic)
    output, *more = problems.attention(v | heads, arithmetic)
    return finish(output), *more


def truth_of_cache(v, arithmetic):
    new = torch.cat([v["latents"], v["rope_keys"]], -1) if "latents" in v else None
    v = v | {"key": new, "k_cache": v["cache"], "v_cache": v["cache"]}
    after = caches.written(v, v["cache"], new)
    heads, finish = of_heads(v, after, arithmetic)
    v |= {"after": {"k_after": heads.pop("key"), "v_after": heads.pop("value")}} | heads
    output, lse, *_ = caches.truth(v, arithmetic)
    return finish(output), lse, after


def of_heads(v, rows, arithmetic):
    """query, key and value of all heads, of latents and rotary keys in one, and what is to be done
    with their output. With errors, where the call may absorb the weights, they are absorbed: the
    query and the output are rounded in between, to the dtype of the call."""
    weight = v["key_weight"]
    latents, rope_keys = rows.tensor_split([weight.size(-1)], -1)
    rope_keys = rope_keys.expand(*rows.shape[:-3], weight.size(0), -1, -1)
    name = "softmax_scale" if "cache" in v else "scale"
    scale = v.get(name)
    if scale is None:
        scale = max(v["query_nope"].size(-1) + v["query_rope"].size(-1), 1) ** -0.5
    if arithmetic.has_errors and v["absorb"] is not False:
        query = arithmetic.stored(v["query_nope"] @ weight)
        heads = {
            name: scale,
            "query": torch.cat([query, v["query_rope"]], -1),
            "key": rows.expand(*rows.shape[:-3], weight.size(0), -1, -1),
            "value": latents.expand(*rows.shape[:-3], weight.size(0), -1, -1),
        }
        return heads, lambda output: arithmetic.stored(output) @ v["value_weight"].mT
    heads = {
        "query": torch.cat([v["query_nope"], v["query_rope"]], -1),
        "key": torch.cat([latents @ weight.mT, rope_keys], -1),
        "value": latents @ v["value_weight"].mT,
    }
    return heads, lambda output: output
