"""All operators, by the names of `--operator`: from a seed to a call.Call."""

import caches
import dense
import latent
import layers
import merging
import multihead
import packed
import rotation

OPERATORS = {
    "attention": dense.attention,
    "flex_attention": dense.flex_attention,
    "attention_weights": dense.attention_weights,
    "attention_with_weights": dense.attention_with_weights,
    "hard_attention": dense.hard_attention,
    "attention_jvp": dense.attention_jvp,
    "varlen_attn": packed.varlen_attn,
    "varlen_attn, paged": packed.paged,
    "latent_attention": latent.latent_attention,
    "latent_attention_with_kvcache": latent.latent_attention_with_kvcache,
    "merge": merging.merge,
    "rotate": rotation.rotate,
    "nn.MultiheadAttention": multihead.multihead,
    "nn.AdditiveAttention": layers.additive,
    "nn.GaussianSmoothing": layers.smoothing,
    "nn.SoftDictionary": layers.dictionary,
    "attention_with_kvcache": caches.attention_with_kvcache,
}
