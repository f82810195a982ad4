"""Layers: torch's, with the operator in place of torch's attention; and other uses of attention:
scores from a small network, smoothing, a dictionary."""

from qkv.nn.additive import AdditiveAttention
from qkv.nn.dictionary import SoftDictionary
from qkv.nn.multihead import MultiheadAttention
from qkv.nn.smoothing import GaussianSmoothing

__all__ = ["AdditiveAttention", "GaussianSmoothing", "MultiheadAttention", "SoftDictionary"]
