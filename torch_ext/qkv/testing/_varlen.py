"""Packed documents, as a composition of torch's operators: each alone, one after the other."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from qkv.options import MASKS
from qkv.testing._functional import attention, of_item
from qkv.testing._scores import Place

if TYPE_CHECKING:
    from torch.nn.attention.varlen import AuxRequest


def varlen_attn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor | None = None,
    max_q: int | None = None,
    max_k: int | None = None,
    *,
    return_aux: AuxRequest | None = None,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    dtype: torch.dtype = torch.float64,
    **options,
) -> Tensor | tuple[Tensor, Tensor]:
    """`qkv.varlen_attn` in torch's operators; what is not named here is as in `attention`.

    Args:
        query: `[T, H, D]`. key: `[Tk, Hkv, D]`. value: `[Tk, Hkv, Dv]`; with block_table key and
            value are `[blocks, block_size, Hkv, ...]`.
        max_q, max_k, num_splits: not needed.
        k_scale, v_scale: what the numbers of an int8 key and value are multiplied by: `[]`, `[1]`,
            `[Hkv]` or `[blocks, block_size, Hkv]`.
        options: those of `attention`, with the numbers of heads, alibi_slopes and the like,
            broadcastable to `[N, H]`, masks and spans to `[N, H, L, S]` and `[N, H, L, 2 n]`, by
            positions within a document; attn_mask and is_causal, too, which `qkv.varlen_attn` has
            not. For dropout_seed documents count as batch items.

    Returns:
        `[T, H, Dv]` in dtype; with `return_aux.lse` also `[H, T]`.

    Raises:
        TypeError: as `attention` does.
        ValueError: as `attention` does, and for block_table without seqused_k.
    """
    if block_table is not None and seqused_k is None:
        raise ValueError("seqused_k is None, but with block_table `[N]` is expected")
    key, value = (
        x if scale is None else x.double() * scale.double().unsqueeze(-1)
        for x, scale in ((key, k_scale), (value, v_scale))
    )
    per_document = (len(cu_seq_q) - 1, query.size(1))
    # Rows that lie in no document stay as they are here.
    output = query.new_zeros(*query.shape[:2], value.size(-1), dtype=dtype)
    lse = query.new_full((query.size(1), query.size(0)), -torch.inf, dtype=dtype)
    for n in range(per_document[0]):
        rows = torch.arange(*cu_seq_q[n : n + 2].tolist(), device=query.device)
        if block_table is None or seqused_k is None:
            begin, end = (cu_seq_q if cu_seq_k is None else cu_seq_k)[n : n + 2].tolist()
            keys = slice(begin, end if seqused_k is None else begin + int(seqused_k[n]))
        else:
            place, size = torch.arange(int(seqused_k[n]), device=key.device), key.size(1)
            keys = block_table[n].long()[place // size], place % size
        its_query, its_key, its_value = (
            x.transpose(0, 1) for x in (query[rows], key[keys], value[keys])
        )
        own = of_item(options, per_document, n, its_query.size(1), its_key.size(1))
        if not its_key.size(1):  # without a pair, nobody looks at masks
            own = {name: x for name, x in own.items() if name not in MASKS}
        found = attention(
            its_query, its_key, its_value, **own,
            dtype=dtype, return_lse=True, place=Place(first_item=n),
        )  # fmt: skip
        output = output.index_copy(0, rows, found[0].transpose(0, 1))
        lse = lse.index_copy(1, rows, found[1])
    return (output, lse) if return_aux is not None and return_aux.lse else output
