"""How we get the numbers: what each option calls."""

import torch
import torch.nn.functional as F

import qkv

PAGE = 16  # keys; vLLM's
INT8_SCALE = 2.0**-5  # of normal numbers: 127 of it are 4


def with_weights(**inputs):
    return qkv.attention_with_weights(**inputs, reduce="heads")[0]


def packed(is_causal, cu_seq_q, **inputs):
    longest = cu_seq_q.diff().max().item()
    window = (-1, 0) if is_causal else (-1, -1)
    return qkv.varlen_attn(
        **inputs, cu_seq_q=cu_seq_q, cu_seq_k=None, max_q=longest, max_k=longest, window_size=window
    )


def cached(query, key, value, is_causal, enable_gqa, seqlen_k, **cache):
    """The cache is full: nothing is appended."""
    return qkv.attention_with_kvcache(query, key, value, cache_seqlens=seqlen_k, **cache)


def as_int8(inputs):
    """`inputs` with key and value of multiples of INT8_SCALE as int8, and scales for each row."""
    scale = torch.full(inputs["key"].shape[:3], INT8_SCALE)
    int8 = {n: (inputs[n] / INT8_SCALE).to(torch.int8) for n in ("key", "value")}
    return inputs | int8 | {"k_scale": scale, "v_scale": scale.clone()}


def pages(inputs):
    """`inputs` with key and value [pages, Hkv, PAGE, D], in any order, and a block_table."""
    batch, _, seqlen_k, _ = inputs["key"].shape
    used = -(-seqlen_k // PAGE)
    generator = torch.Generator().manual_seed(0)
    table = torch.randperm(batch * used, generator=generator).view(batch, used).int()

    def paged(x):
        x = F.pad(x, (0, 0, 0, used * PAGE - seqlen_k)).unflatten(2, (used, PAGE)).transpose(1, 2)
        found = torch.empty_like(x).flatten(0, 1)
        found[table.flatten().long()] = x.flatten(0, 1)
        return found

    return inputs | {"key": paged(inputs["key"]), "value": paged(inputs["value"]),
                     "block_table": table}  # fmt: skip
