"""Calls of latent_attention, and the truth of them: attention to expanded keys and values."""

import dense
import problems
import torch
from draw import SUFFIX, Draw

LEAVES = ("query_nope", "query_rope", "latents", "rope_keys", "key_weight", "value_weight")


def latent_attention(seed):
    d = Draw(seed, "latent_attention")
    mood = d.start_numbers()
    if d.dtype == torch.float16 and mood in ("mean", "offset", "scores"):
        mood = "ordinary"  # projections are float16 themselves: theirs would pass its 65504
    lead = (*d.pick({(): 3, (1,): 3, (2,): 4, (2, 2): 1}), d.between(1, 5))
    L, S = d.length(), d.length()
    N, R, C, Dv = (d.pick(x) for x in ((1, 3, 8, 32), (0, 1, 4, 16), (1, 3, 8, 40), (1, 8, 20)))
    d.tensor("query_nope", (*lead, L, N), mood, role="query")
    d.tensor("query_rope", (*lead, L, R), mood, role="query")
    one = (*lead[:-1], 1, S)
    if d.chance(0.3):
        d.tensor("latents", (*one, C + R), mood, role="key")
        rope_keys = "None"
    else:
        d.tensor("latents", (*one, C), mood, role="key")
        d.tensor("rope_keys", (*one, R), mood, role="key")
        rope_keys = "rope_keys"
    for name, rows in (("key_weight", N), ("value_weight", Dv)):
        sizes = ", ".join(map(str, (d.seed(), lead[-1], rows, C)))
        d.tensors[name] = f"(normal({sizes}) / {C**0.5:.3g}){SUFFIX[d.dtype]}"
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


def truth(v, arithmetic):
    latents, rope_keys = v["latents"], v.get("rope_keys")
    if rope_keys is None:
        C = v["key_weight"].size(-1)
        latents, rope_keys = latents[..., :C], latents[..., C:]
    H = v["query_nope"].size(-3)
    rope_keys = rope_keys.expand(*rope_keys.shape[:-3], H, *rope_keys.shape[-2:])
    expanded = {
        "query": torch.cat([v["query_nope"], v["query_rope"]], -1),
        "key": torch.cat([latents @ v["key_weight"].mT, rope_keys], -1),
        "value": latents @ v["value_weight"].mT,
    }
    return problems.attention(v | expanded, arithmetic)
