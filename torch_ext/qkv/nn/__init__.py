"""Layers: torch's, with the operator in place of torch's attention; and additive attention."""

from qkv.nn.additive import AdditiveAttention
from qkv.nn.multihead import MultiheadAttention

__all__ = ["AdditiveAttention", "MultiheadAttention"]
