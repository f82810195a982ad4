"""Layers: torch's, with the operator in place of torch's attention; self- and cross attention as
models of today have them; and other uses of attention."""

from qkv.nn.additive import AdditiveAttention
from qkv.nn.cached_decoder import CachedDecoder
from qkv.nn.cross_attention import CrossAttention
from qkv.nn.dictionary import SoftDictionary
from qkv.nn.kvcache import KVCache
from qkv.nn.multihead import MultiheadAttention
from qkv.nn.rotary import Rotary
from qkv.nn.self_attention import SelfAttention
from qkv.nn.smoothing import GaussianSmoothing

__all__ = [
    "AdditiveAttention",
    "CachedDecoder",
    "CrossAttention",
    "GaussianSmoothing",
    "KVCache",
    "MultiheadAttention",
    "Rotary",
    "SelfAttention",
    "SoftDictionary",
]
