"""torch's Transformer decoder, a part of its sequence at a time."""

import copy
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from qkv._refuse import refuse
from qkv.nn._attend import project
from qkv.nn._linear import linear
from qkv.nn._masks import as_added
from qkv.nn.kvcache import KVCache

_refuse = partial(refuse, error=RuntimeError, function="CachedDecoder")


class CachedDecoder:
    """A `torch.nn.TransformerDecoder`, or one of its layers, that generates: each call computes the
    next places of the target, and attends to those before through caches.

    Results are those of the decoder for the whole target under a causal mask. The decoder stays as
    it is, and its parameters are not copied. Apart from `self_attn`, nothing in it may look at
    other places of the target.

    Args:
        decoder: in eval mode. Its attention layers are torch's, or `qkv.nn.MultiheadAttention`.
        memory: `[B, S, E]`, or `[S, B, E]` without batch_first: what it attends to. Each layer
            projects it once, here.
        length: how many places of the target each row has room for.
        memory_key_padding_mask: `[B, S]`, as torch's decoder takes it: True hides, or floating.
        dtype: of the caches, torch.int8 as in `SelfAttention`; that of the projections if None.

    `caches` has two `KVCache` for each layer, of the target and of the memory.

    Raises:
        TypeError: decoder is neither, or attends by layers of another class.
        RuntimeError: shapes that do not fit; a decoder in training mode; options of its layers
            that count keys from the last one, where more are still to come.

    Example:
        >>> layer = torch.nn.TransformerDecoderLayer(64, 4, batch_first=True)
        >>> decoder, memory = torch.nn.TransformerDecoder(layer, 2).eval(), torch.randn(2, 9, 64)
        >>> with torch.no_grad():
        ...     steps = qkv.nn.CachedDecoder(decoder, memory, length=20)
        ...     prompt, following = steps(torch.randn(2, 5, 64)), steps(torch.randn(2, 1, 64))
        >>> following.shape
        torch.Size([2, 1, 64])
    """

    @torch.no_grad()
    def __init__(
        self, decoder: nn.TransformerDecoder | nn.TransformerDecoderLayer, memory: Tensor,
        length: int, *, memory_key_padding_mask: Tensor | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        layers = _layers_of(decoder)
        attention: nn.MultiheadAttention = layers[0].self_attn
        self._width, self._rows = attention.embed_dim, 0 if attention.batch_first else 1
        width, self._memory = layers[0].multihead_attn.kdim, memory
        if memory.dim() != 3 or memory.size(2) != width:
            _refuse("memory", memory, f"{self._shape('B', 'S', width)} is expected")
        batch, keys = memory.size(self._rows), memory.size(1 - self._rows)
        if length < 1:
            _refuse("length", length, "1 or more is expected")
        mask, self._bias = memory_key_padding_mask, None
        if mask is not None:
            if mask.shape != (batch, keys):
                _refuse("memory_key_padding_mask", mask, f"[{batch}, {keys}] is expected")
            if mask.dtype != torch.bool and not mask.is_floating_point():
                wanted = "bool (True = hidden) or a floating dtype is expected"
                _refuse("memory_key_padding_mask", mask.dtype, wanted)
            wide = torch.promote_types(attention.out_proj.weight.dtype, torch.float32)
            self._bias = as_added(mask)[:, None, None].to(wide)
        self.caches: list[tuple[KVCache, KVCache]] = []
        twins = []
        for layer in layers:
            one = layer.self_attn
            heads = project(layer.multihead_attn, None, memory, memory)
            key, value = (x.movedim(1 - self._rows, -2) for x in heads)
            of_memory = KVCache.filled(key, value, dtype)
            own = KVCache.empty(batch, one.num_heads, length, one.head_dim, of_memory.keys.dtype)
            self.caches.append((own, of_memory))
            other = _Attention(self, layer.multihead_attn, of_memory)
            twins.append(_with(layer, self_attn=_Attention(self, one, own), multihead_attn=other))
        is_layer = isinstance(decoder, nn.TransformerDecoderLayer)
        self._decoder = twins[0] if is_layer else _with(decoder, layers=nn.ModuleList(twins))

    def __call__(self, tgt: Tensor) -> Tensor:
        """The decoder's output for the next L places of the target, `[B, L, E]` or `[L, B, E]`."""
        batch = len(self.lengths)
        if tgt.dim() != 3 or tgt.size(2) != self._width or tgt.size(self._rows) != batch:
            _refuse("tgt", tgt, f"{self._shape(batch, 'L', self._width)} is expected")
        return self._decoder(tgt, self._memory)

    @property
    def lengths(self) -> Tensor:
        """`[B]`: how many places of the target each row has. It may be set, to take places back,
        or where rows of a first call were padded on the right."""
        return self.caches[0][0].lengths

    @lengths.setter
    def lengths(self, lengths: Tensor) -> None:
        for own, _ in self.caches:
            own.lengths = lengths

    def select(self, rows: Tensor) -> None:
        """Makes row i what row `rows[i]` was, for a search with beams: `[B']`, which may be more
        than B or fewer."""
        self._memory = self._memory.index_select(self._rows, rows)
        self._bias = self._bias if self._bias is None else self._bias[rows]
        for cache in [cache for both in self.caches for cache in both]:
            for name in ("keys", "values", "lengths", "k_scale", "v_scale"):
                tensor = getattr(cache, name)
                setattr(cache, name, tensor if tensor is None else tensor[rows])

    def _shape(self, batch: int | str, sequence: str, width: int) -> str:
        first, second = (batch, sequence) if self._rows == 0 else (sequence, batch)
        return f"[{first}, {second}, {width}]"


class _Attention(nn.Module):
    """What a decoder's layer calls in place of one of its attention layers."""

    def __init__(
        self, decoder: CachedDecoder, layer: nn.MultiheadAttention, cache: KVCache
    ) -> None:
        super().__init__()
        self.layer, self.cache, self.decoder = layer, cache, decoder
        self.batch_first = layer.batch_first

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, **others: Any
    ) -> tuple[Tensor, None]:
        for name in ("attn_mask", "key_padding_mask", "need_weights"):
            if others.get(name) is not None and others[name] is not False:
                _refuse(name, "given", "a layer that gives none is expected")
        is_own, sequence = key is query, 1 if self.batch_first else 0
        inputs = (query, key, value) if is_own else (query, None, None)
        heads = [x.movedim(sequence, -2) for x in project(self.layer, *inputs)]
        options = {name: getattr(self.layer, name) for name in getattr(self.layer, "_given", ())}
        options["softmax_scale"] = options.pop("scale", None)
        if is_own:
            output = self.cache.attend(*heads, causal=True, **options)
        else:
            output = self.cache.attend(heads[0], None, None, bias=self.decoder._bias, **options)
        output = output.movedim(-2, sequence).flatten(-2)
        return linear(output, self.layer.out_proj.weight, self.layer.out_proj.bias), None


def _layers_of(decoder: Any) -> list[Any]:
    """Its layers, each of which attends to the target and to the memory and to nothing else."""
    wanted = "a torch.nn.TransformerDecoder or TransformerDecoderLayer is expected"
    if not isinstance(decoder, nn.TransformerDecoder | nn.TransformerDecoderLayer):
        _refuse("decoder", f"a {type(decoder).__name__}", wanted, error=TypeError)
    is_layer = isinstance(decoder, nn.TransformerDecoderLayer)
    layers: list[Any] = [decoder] if is_layer else [*decoder.layers]
    known = [x for layer in layers for x in (layer.self_attn, layer.multihead_attn)]
    every = [x for x in decoder.modules() if isinstance(x, nn.MultiheadAttention)]
    if {*map(id, known)} != {*map(id, every)}:
        wanted = "self_attn and multihead_attn, of torch's class, are expected to be all"
        _refuse("decoder's attention", "another", wanted, error=TypeError)
    if decoder.training:
        _refuse("decoder", "in training mode", "eval() is expected")
    counting = {"window_size", "alibi_slopes"}
    for layer in layers:
        for name, refused in {"self_attn": set(), "multihead_attn": counting}.items():
            x = getattr(layer, name)
            given = refused.intersection(getattr(x, "_given", ()))
            given |= {"add_bias_kv"} if x.bias_k is not None else set()
            for option in given | ({"add_zero_attn"} if x.add_zero_attn else set()):
                _refuse(option, "given", f"{name} without it is expected")
    return layers


def _with(module: nn.Module, **parts: nn.Module) -> Any:
    """A module that has these parts instead of its own, and all else together with the first."""
    twin = copy.copy(module)
    twin._modules = module._modules | parts
    return twin
