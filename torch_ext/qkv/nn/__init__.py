"""Layers: torch's, with the operator in place of torch's attention."""

from qkv.nn.multihead import MultiheadAttention

__all__ = ["MultiheadAttention"]
