"""Attention over more than one process, on torch.distributed."""

from qkv.distributed._dtensor import register as _register_dtensor

_register_dtensor()
