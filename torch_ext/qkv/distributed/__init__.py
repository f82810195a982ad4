"""Attention over more than one process, on torch.distributed.

On import, every operator of the package learns what to do with DTensors. A sequence that is too
long for one machine is cut over the ranks of a process group: see `ring_attention`, `shard` and
`unshard`.
"""

from qkv.distributed._attention import ring_attention
from qkv.distributed._dtensor import register as _register_dtensor
from qkv.distributed._shards import shard, unshard

__all__ = ["ring_attention", "shard", "unshard"]

_register_dtensor()
