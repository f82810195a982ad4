"""`qkv.convert`: the attention of a model that exists."""

from qkv._conversion.convert import Conversion, convert

__all__ = ["Conversion", "convert"]
