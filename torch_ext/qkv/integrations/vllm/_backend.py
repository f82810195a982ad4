"""The classes by which vLLM calls an attention: which cases it has, what it is told of a batch, and
what it computes."""

# vLLM cannot be installed where pyright runs.
# pyright: reportMissingImports=false
from functools import partial
from typing import Any

import torch
from torch import Tensor
from vllm.v1.attention.backend import (
    AttentionImpl,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
)
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.attention.backends.mla.cpu_mla import CPUMLABackend, CPUMLAImpl

from qkv._kvcache import attention_with_kvcache
from qkv._refuse import refuse
from qkv._varlen import varlen_attn

_refuse = partial(refuse, error=NotImplementedError, function="qkv in vLLM")
_ENCODERS = (AttentionType.ENCODER, AttentionType.ENCODER_ONLY)


class Backend(CPUAttentionBackend):
    """In place of `CPU_ATTN`, with its caches. Some models ask for a subclass of that."""

    forward_includes_kv_cache_update = False
    supported_kv_cache_dtypes = ["auto"]

    @classmethod
    def supports_kv_cache_dtype(cls, kv_cache_dtype: str | None) -> bool:
        return kv_cache_dtype in (None, "auto")

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return []  # any

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @staticmethod
    def get_impl_cls() -> "type[Attention]":
        return Attention

    @staticmethod
    def get_builder_cls() -> "type[Builder]":
        return Builder


class Builder(AttentionMetadataBuilder[CommonAttentionMetadata]):
    """Of a batch the operator is told what vLLM tells every backend."""

    # vLLM declares it abstract.
    def __init__(self, kv_cache_spec: Any, layer_names: Any, vllm_config: Any, device: Any) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> CommonAttentionMetadata:  # fmt: skip
        if isinstance(common_attn_metadata.causal, Tensor):
            _refuse("causal", "one for each request", "one for all is expected")
        return common_attn_metadata


class Attention(AttentionImpl[CommonAttentionMetadata]):
    """One layer's attention. A batch may mix prompts, parts of prompts and steps."""

    def __init__(
        self, num_heads: int, head_size: int, scale: float, num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None, sliding_window: int | None = None,
        kv_cache_dtype: str = "auto", logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER, kv_sharing_target_layer_name: str | None = None,
        sinks: Tensor | None = None,
    ) -> None:  # fmt: skip
        if kv_cache_dtype != "auto":
            _refuse("kv_cache_dtype", kv_cache_dtype, "auto is expected: the model's own")
        if alibi_slopes is not None and attn_type != AttentionType.DECODER:
            # vLLM adds slope * (key - query) to the scores, qkv takes slope * |key - query| off:
            # behind a query the two differ.
            _refuse("alibi_slopes", "given", f"None is expected of attn_type {attn_type}")
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.kv_cache_dtype, self.attn_type = kv_cache_dtype, attn_type
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.sliding_window, self.sinks = sliding_window, sinks
        # Models are made with their own dtype as the default, which slopes would be rounded to.
        self.alibi_slopes = None
        if alibi_slopes is not None:
            self.alibi_slopes = torch.tensor(alibi_slopes, dtype=torch.float32)
        self.softcap = logits_soft_cap or 0.0

    def forward(
        self, layer: Any, query: Tensor, key: Tensor, value: Tensor, kv_cache: Tensor,
        attn_metadata: CommonAttentionMetadata | None, output: Tensor,
        output_scale: Tensor | None = None, output_block_scale: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Writes `[tokens, H, D]` to output, of a query like it. What an encoder has in key and
        value, `[tokens, Hkv, D]`, a decoder has in its cache by now."""
        if output_scale is not None or output_block_scale is not None:
            _refuse("output_scale", "given", "None is expected: outputs are not quantized")
        if attn_metadata is None:  # to warm up
            return output
        tokens, begins = attn_metadata.num_actual_tokens, attn_metadata.query_start_loc
        is_causal = bool(attn_metadata.causal) and self.attn_type == AttentionType.DECODER
        left = -1 if self.sliding_window is None else self.sliding_window - 1
        pages: dict[str, Any] = {}
        if self.attn_type in _ENCODERS:
            key, value = key[:tokens], value[:tokens]
        else:
            key, value = (x.transpose(1, 2) for x in self._pages(kv_cache))
            pages["seqused_k"] = attn_metadata.seq_lens
            pages["block_table"] = attn_metadata.block_table_tensor
        found: Any = varlen_attn(
            query[:tokens], key, value, begins, None,
            attn_metadata.max_query_len, attn_metadata.max_seq_len,
            scale=self.scale, window_size=(left, 0 if is_causal else left), enable_gqa=True,
            softcap=self.softcap, alibi_slopes=self.alibi_slopes,
            sinks=None if self.sinks is None else self.sinks.float(), **pages,
        )  # fmt: skip
        output[:tokens] = found
        return output

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """Writes key and value, `[tokens, Hkv, D]`, to their slots: slot i is row
        `i % block_size` of block `i // block_size`, and less than 0 is none."""
        if self.attn_type in _ENCODERS:
            return
        chosen = (slot_mapping >= 0).nonzero().squeeze(1)
        slots = slot_mapping[chosen]
        for pages, rows in zip(self._pages(kv_cache), (key, value), strict=True):
            size = pages.size(2)
            pages.transpose(1, 2)[slots // size, slots % size] = rows[chosen].to(pages.dtype)

    def _pages(self, kv_cache: Tensor) -> tuple[Tensor, ...]:
        """Keys and values, `[blocks, Hkv, block_size, D]` each, of `[blocks, Hkv, block_size,
        2 D]`, in which a head's keys of a block lie before its values."""
        blocks, heads, size, both = kv_cache.shape
        if both != 2 * self.head_size:
            wanted = f"a last dimension of {2 * self.head_size} is expected, for keys and values"
            _refuse("kv_cache", kv_cache, wanted)
        return kv_cache.view(blocks, heads, 2 * size, -1).chunk(2, 2)


class LatentBackend(CPUMLABackend):
    """In place of `CPU_MLA`, whose prompts it keeps: steps attend by qkv, with latents of any
    width."""

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return []

    @staticmethod
    def get_impl_cls() -> "type[LatentAttention]":
        return LatentAttention


class LatentAttention(CPUMLAImpl):
    def forward_mqa(
        self, q: Tensor | tuple[Tensor, Tensor], kv_c_and_k_pe_cache: Tensor, attn_metadata: Any,
        layer: Any,
    ) -> tuple[Tensor, None]:  # fmt: skip
        """`[requests, H, C]`, of queries behind the keys' projection, `[requests, H, C + R]`, and
        of a cache of latents and rotated keys, `[blocks, block_size, C + R]`."""
        query = torch.cat(q, -1) if isinstance(q, tuple) else q
        pages = kv_c_and_k_pe_cache.unsqueeze(1)  # all heads share one of keys
        decode = attn_metadata.decode
        output = attention_with_kvcache(
            query.unsqueeze(2), pages, pages[..., : self.kv_lora_rank],
            cache_seqlens=decode.seq_lens, block_table=decode.block_table,
            softmax_scale=self.scale,
        )  # fmt: skip
        return output.squeeze(2), None
