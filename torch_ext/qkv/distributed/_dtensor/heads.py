"""Grouped heads: which key/value heads a process has, where the query heads are divided.

Query head h reads key/value head h // (heads / kv_heads), and a call on one process counts both
from 0 again. So either a process has whole groups: all query heads of some key/value heads, and
these. Or all its query heads belong to one key/value head, and its call gets that one alone.
"""

from collections.abc import Sequence
from typing import NamedTuple


class Share(NamedTuple):
    """Of the dimensions of the mesh that divide the query heads, the first `divided` ones divide
    the key/value heads as well, into parts of `heads`. The others do not. head: the one of these
    that the calls of this process get; None: they get all."""

    divided: int
    heads: int
    head: int | None


def share_of(
    kv_heads: int, heads: int, processes: Sequence[int], place: Sequence[int]
) -> Share | None:
    """processes: the sizes of the dimensions of the mesh that divide the query heads, in order.
    place: this process's coordinates in them. None: the heads cannot be divided like that."""
    divided = 0
    while divided < len(processes) and kv_heads % processes[divided] == 0:
        kv_heads //= processes[divided]
        heads //= processes[divided]
        divided += 1
    if divided == len(processes):
        return Share(divided, kv_heads, None)
    if kv_heads == 1:
        return Share(divided, kv_heads, 0)
    number, count = 0, 1
    for size, coordinate in zip(processes[divided:], place[divided:], strict=True):
        number, count = number * size + coordinate, count * size
    group = heads // kv_heads
    if heads % count or group % (heads // count):
        return None
    return Share(divided, kv_heads, number * (heads // count) // group)
