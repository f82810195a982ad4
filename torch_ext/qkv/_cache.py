"""Memory for caches of keys and values."""

import contextlib
import math
import mmap
import sys
from collections.abc import Sequence

import torch
from torch import Tensor

from qkv._watched import is_watched

# Of x86-64, and of AArch64 with pages of 4 KiB. Memory that a huge page is to hold begins at a
# multiple of this.
_HUGE_PAGE = 2 << 20


def new_cache(shape: Sequence[int], *, dtype: torch.dtype | None = None) -> Tensor:
    """Zeros for a cache of keys or values, in huge pages where the system has them.

    docs/decoding.md has what huge pages gain. Where there are none, where the cache is smaller than
    one, and in what is compiled or traced, it is as `torch.zeros` makes it. It cannot be resized.

    Args:
        shape: of the cache, say `[B, Hkv, S_max, D]`, or `[blocks, Hkv, block_size, D]` in
            blocks.
        dtype: of the cache; torch's default if None.

    Returns:
        A contiguous tensor on the CPU.

    Raises:
        ValueError: a negative size.
        OSError: the system does not have so much memory.

    Example:
        >>> k_cache, v_cache = qkv.new_cache((2, 1, 8, 4096, 128), dtype=torch.bfloat16)
        >>> k_cache.shape
        torch.Size([1, 8, 4096, 128])

    Source: madvise(2) in the Linux manual.
    """
    sizes, dtype = tuple(shape), dtype or torch.get_default_dtype()
    if any(size < 0 for size in sizes):
        raise ValueError(f"shape: expected sizes of 0 or more, got {sizes}")
    count = math.prod(sizes)
    # Whoever records operators, or fakes them, sees none that makes a tensor of a buffer.
    if is_watched() or sys.platform != "linux" or count * dtype.itemsize < _HUGE_PAGE:
        return torch.zeros(sizes, dtype=dtype, device="cpu")
    # Private: what is shared, Python's default, has huge pages by another setting, mostly off.
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    memory = mmap.mmap(-1, count * dtype.itemsize + _HUGE_PAGE, flags=private)
    with contextlib.suppress(OSError):  # a system that has none
        memory.madvise(mmap.MADV_HUGEPAGE)
    begin = -torch.frombuffer(memory, dtype=torch.uint8).data_ptr() % _HUGE_PAGE
    # The tensor keeps the memory, which is given back with it.
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=begin).view(sizes)
