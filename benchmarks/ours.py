"""How we get the numbers: what each option calls."""

import torch
import torch.nn.functional as F

import qkv

PAGE = 16  # keys; vLLM's


def with_weights(**inputs):
    return qkv.attention_with_weights(**inputs, reduce="heads")[0]


def packed(is_causal, cu_seq_q, **inputs):
    longest = cu_seq_q.diff().max().item()
    window = (-1, 0) if is_causal else (-1, -1)
    return qkv.varlen_attn(
        **inputs, cu_seq_q=cu_seq_q, cu_seq_k=None, max_q=longest, max_k=longest, window_size=window
    )


def cached(query, key, value, is_causal, enable_gqa, seqlen_k, block_table=None):
    """The cache is full: nothing is appended."""
    return qkv.attention_with_kvcache(
        query, key, value, cache_seqlens=seqlen_k, block_table=block_table
    )


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
