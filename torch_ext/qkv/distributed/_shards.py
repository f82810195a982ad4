"""Which rank holds which part of a sequence.

A sequence over n ranks is cut into 2n chunks of one size, and rank r holds chunks r and 2n - 1 - r,
in this order: its shard. A query of a causal model attends to all that is before it, so that the
first chunks have little to compute and the last ones much; with one of both, all ranks have equally
much. The last chunks are padded where the length does not divide.
"""

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from qkv._refuse import refuse
from qkv.distributed._agree import agree, eager, told
from qkv.distributed._plan import Plan
from qkv.distributed._ranks import Group, Ranks, Team, team_of
from qkv.distributed._transport import all_gather, all_to_all, linear, wide


def shard(tensor: Tensor, dim: int, group: Group = None, *, value: float = 0) -> Tensor:
    """This rank's part of a tensor that every rank has whole, in the order of `ring_attention`.

    For whatever goes along with the sequence: token numbers, labels, embeddings, the positions for
    RoPE (`shard(torch.arange(N), 0)`). No rank waits for another here.

    Args:
        tensor: of any dtype, the same on all ranks; `N` long along dim.
        dim: which dimension is the sequence.
        group: as in `ring_attention`.
        value: what it is padded with where 2n does not divide N, of n ranks: of labels, the number
            that the loss ignores.

    Returns:
        A copy, `2 * ceil(N / (2 * n))` long along dim: of the 2n chunks of the sequence, numbers r
        and 2n - 1 - r. Its gradient is that of this rank's own tensor: 0 where other ranks have
        their parts.

    Raises:
        RuntimeError: torch.distributed is not initialized.
        ValueError, TypeError: group is none, or this process is not in it.
        IndexError: there is no such dim.

    Example (of two ranks, on the first):
        >>> qkv.distributed.shard(torch.arange(7), 0, value=-100)
        tensor([   0,    1,    6, -100])
    """
    team = team_of("shard", group)
    check_dense("tensor", tensor, "shard")
    length = tensor.size(dim)
    chunk = -(-length // (2 * team.size))
    spans = Plan(team.size, chunk, length).spans(team.rank)
    parts = [tensor.narrow(dim, x.positions.begin, x.positions.size) for x in spans]
    parts = parts or [tensor.narrow(dim, 0, 0)]  # padding alone has a gradient, too, as elsewhere
    shape = [*tensor.shape]
    shape[dim] = 2 * chunk - sum(x.positions.size for x in spans)  # behind the end of the sequence
    return torch.cat([*parts, tensor.new_full(shape, value)], dim)


def unshard(tensor: Tensor, dim: int, group: Group = None, *, seqlen: int | None = None) -> Tensor:
    """The whole of a tensor of which each rank has a shard, on every rank.

    Args:
        tensor: a shard, as `shard` and `ring_attention` return it: of one shape and dtype on all
            ranks, which requires grad on all of them or on none.
        dim: which dimension is the sequence.
        group: as in `ring_attention`.
        seqlen: the length of the sequence, if it was padded.

    Returns:
        n times as long along dim, or seqlen long, in the order of the sequence. Its gradient is
        that of the sum of all ranks' losses, as of `torch.distributed.nn.all_gather`: every rank
        must call backward. Ranks that all compute one loss of the whole get n times its gradient.

    Raises:
        RuntimeError: shards that differ, or a rank that failed, on every rank.
        ValueError, TypeError: as `shard` does.

    Example (on each of two ranks):
        >>> own = qkv.distributed.shard(torch.arange(7), 0)
        >>> qkv.distributed.unshard(own, 0, seqlen=7)
        tensor([0, 1, 2, 3, 4, 5, 6])
    """
    return eager(_unshard)(tensor, dim, group, seqlen)


def _unshard(tensor: Tensor, dim: int, group: Group, seqlen: int | None) -> Tensor:
    team = team_of("unshard", group)
    facts, failure = {"function": "unshard"}, None
    try:
        check_dense("tensor", tensor)
        dim = _whole_number("dim", dim)
        dim = dim if dim >= 0 else dim + tensor.dim()
        if not 0 <= dim < tensor.dim():
            refuse("dim", dim, f"0 to {tensor.dim() - 1} is expected")
        seqlen = length_of(f"dim {dim} of tensor", tensor.size(dim), seqlen, team)
        facts |= {"dim": dim, "seqlen": seqlen, "tensor": told(tensor)}
    except (TypeError, ValueError) as error:
        failure = error
    _, team = agree(facts, team, failure=failure)
    assert seqlen is not None  # or all ranks have raised
    for ranks in team.all:
        (tensor,) = linear(_gathered, _sum_of_shards, tensor, dim=dim, ranks=ranks)
    return tensor.narrow(dim, 0, seqlen)


def length_of(name: str, rows: int, seqlen: int | None, team: Team) -> int:
    """The length of the sequence of which each rank has so many rows: seqlen, or all of them. name:
    what has the rows."""
    if rows % 2:
        raise ValueError(
            f"{name} has {rows} rows, but an even number is expected, as qkv.distributed.shard "
            "returns"
        )
    most = rows * team.size
    seqlen = most if seqlen is None else _whole_number("seqlen", seqlen)
    if not 0 <= seqlen <= most:
        refuse("seqlen", seqlen, f"0 to {most} is expected: {team.size} shards of {rows} rows")
    return seqlen


def _whole_number(name: str, number: Any) -> int:
    """numpy's are said as 50, too, and not as np.int64(50)."""
    if isinstance(number, bool) or not hasattr(number, "__index__"):
        refuse(name, repr(number), "an int is expected", TypeError)
    return operator.index(number)


def check_dense(name: str, tensor: Any, function: str = "") -> None:
    """Refuses what is no tensor of this rank's own."""
    if not isinstance(tensor, Tensor) or tensor.is_nested or tensor.layout != torch.strided:
        what = repr(tensor)
        if isinstance(tensor, Tensor):
            what = "a nested tensor" if tensor.is_nested else f"a tensor of {tensor.layout}"
        refuse(name, what, "a dense tensor is expected", TypeError, function)
    if hasattr(tensor, "placements"):  # torch.distributed.tensor takes time to import
        wanted = "what this rank has of it, .to_local(), is expected"
        refuse(name, "a DTensor", wanted, TypeError, function)


def natural(shards: Sequence[Tensor], dim: int) -> Tensor:
    """The shards of all ranks as one tensor, in the order of the sequence."""
    halves = [x.tensor_split(2, dim) for x in shards]
    return torch.cat([first for first, _ in halves] + [last for _, last in reversed(halves)], dim)


def zigzag(tensor: Tensor, dim: int, size: int) -> list[Tensor]:
    """The shards of `size` ranks; 2 * size divides the length."""
    chunks = tensor.tensor_split(2 * size, dim)
    return [torch.cat([chunks[r], chunks[-1 - r]], dim) for r in range(size)]


def _gathered(tensor: Tensor, dim: int, ranks: Ranks) -> Tensor:
    """The shards of all ranks, in the order of the sequence."""
    return natural(all_gather(tensor, ranks, "unshard: gathering"), dim)


def _sum_of_shards(tensor: Tensor, dim: int, ranks: Ranks) -> Tensor:
    """Of the tensors of all ranks, whole: the sum of what belongs to this rank's shard."""
    doing = "unshard: summing gradients"
    received = torch.stack(all_to_all(zigzag(tensor, dim, ranks.size), ranks, doing))
    return received.sum(0, dtype=wide(tensor.dtype)).to(tensor.dtype)
