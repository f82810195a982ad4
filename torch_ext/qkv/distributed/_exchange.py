"""Keys and values on their way to the queries that see them, and their gradients on their way back.

At step s of n, each rank attends to keys of the rank s places before it, and they come from there
directly: a rank sends to each other what that one sees, and no more. Of a causal sequence that is
three quarters of what would go from neighbour to neighbour around the ring, of a sequence with a
window little more than the window.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from qkv.distributed._block import heads_of, rows_of
from qkv.distributed._plan import Plan, Range, Step
from qkv.distributed._ranks import Ranks
from qkv.distributed._transport import Transfer, receive, send

# The numbers of the messages, apart from those that a program may send in the same group.
_KEYS, _GRADIENTS = 7161, 7162


class Visit(NamedTuple):
    """One step of one part of the heads."""

    part: int
    step: int


@dataclass
class Arrival:
    """Keys and values on their way here, and others on their way to another rank."""

    tensors: list[Tensor]
    coming: Transfer | None = None
    leaving: Transfer | None = None

    def wait(self) -> list[Tensor]:
        """Key and value `[..., Hkv, columns, D]`, when they are here."""
        if self.coming is not None:
            self.coming.wait()
        return self.tensors

    def finish(self) -> None:
        """Lets go of the memory, when what left has arrived elsewhere."""
        if self.leaving is not None:
            self.leaving.wait()
        self.tensors.clear()


class Exchange:
    """What a rank exchanges with the others, while it visits their keys one after the other.

    Args:
        tensors: key and value `[..., Hkv, L_local, D]`, of the same shapes on all ranks.
        parts: into how many parts of their heads messages are cut.
        phase: what errors call it.
    """

    def __init__(self, tensors: Sequence[Tensor], ranks: Ranks, plan: Plan, parts: int, phase: str):
        self._tensors, self._ranks, self._parts, self._phase = tensors, ranks, parts, phase
        others = [ranks.around(-step) for step in range(ranks.size)]
        self.steps: list[Step] = [plan.step(ranks.rank, other) for other in others]
        # What the rank that many places further on sees of the own keys.
        self._seen = [
            plan.step(ranks.around(step), ranks.rank).columns for step in range(ranks.size)
        ]
        self.visits = [Visit(p, step) for p in range(parts) for step in range(ranks.size)]

    def own(self, tensors: Sequence[Tensor], part: int) -> list[Tensor]:
        """Views of one part of the heads."""
        return [heads_of(x, -3, part, self._parts) for x in tensors]

    def _doing(self, step: int, what: str) -> str:
        return f"ring_attention: {self._phase}, step {step + 1} of {self._ranks.size}: {what}"

    def arrivals(self) -> Iterator[tuple[Visit, Arrival]]:
        """Each visit, while the keys and values of the next one are on their way."""
        arriving = self._start(self.visits[0])
        for number, visit in enumerate(self.visits):
            current = arriving
            if number + 1 < len(self.visits):
                arriving = self._start(self.visits[number + 1])
            yield visit, current
            current.finish()

    def _start(self, visit: Visit) -> Arrival:
        """Begins to receive the keys and values of a visit, and to send the own ones to the rank
        that is as many places further on."""
        part, step = visit
        own = self.own(self._tensors, part)
        if step == 0:
            return Arrival([_selected(x, self.steps[0].columns) for x in own])
        leaving, views = _buffer(own, self._seen[step])
        for view, tensor in zip(views, own, strict=True):
            for place, rows in _places(self._seen[step]):
                rows_of(view, place).copy_(rows_of(tensor, rows))
        coming, views = _buffer(own, self.steps[step].columns)
        source, target = self._ranks.around(-step), self._ranks.around(step)
        doing = self._doing(step, "{} keys and values")
        return Arrival(
            views,
            receive(coming, self._ranks, source, _KEYS, doing.format("receiving")),
            send(leaving, self._ranks, target, _KEYS, doing.format("sending")),
        )

    def shares(self, visit: Visit, home: Sequence[Tensor | None]) -> "Shares":
        """Zeros, for the gradients of the keys and values of a visit, which belong to other ranks:
        of those of which this rank has the gradients `home`."""
        own = self.own([x for x in home if x is not None], visit.part)
        flat, views = _buffer(own, self.steps[visit.step].columns, zero=True)
        rest = iter(views)
        return Shares(flat, [x if x is None else next(rest) for x in home])

    def send_back(self, visit: Visit, shares: "Shares", home: Sequence[Tensor | None]) -> "Return":
        """Begins to send the shares to the rank that they belong to, and to receive what another
        has computed for `home`, the gradients of the own keys and values."""
        part, step = visit
        own = self.own([x for x in home if x is not None], part)
        if step == 0:
            views = [x for x in shares.views if x is not None]
            return Return(own, views, self.steps[0].columns, [])
        coming, views = _buffer(own, self._seen[step])
        source, target = self._ranks.around(-step), self._ranks.around(step)
        doing = self._doing(step, "{} gradients of keys and values")
        transfers = [
            receive(coming, self._ranks, target, _GRADIENTS, doing.format("receiving")),
            send(shares.flat, self._ranks, source, _GRADIENTS, doing.format("sending")),
        ]
        return Return(own, views, self._seen[step], transfers)


@dataclass
class Shares:
    """Gradients of keys and values of another rank: one message, and views of it."""

    flat: Tensor
    views: list[Tensor | None]


@dataclass
class Return:
    """Gradients of the own keys and values on their way home."""

    home: list[Tensor]
    views: list[Tensor]
    columns: list[Range]
    transfers: list[Transfer]

    def wait(self) -> None:
        for transfer in self.transfers:
            transfer.wait()
        for tensor, share in zip(self.home, self.views, strict=True):
            for place, rows in _places(self.columns):
                rows_of(tensor, rows).add_(rows_of(share, place))


def _places(columns: list[Range]) -> list[tuple[Range, Range]]:
    """Where each of these rows is in a message, and in the tensor that it is of."""
    places, begin = [], 0
    for rows in columns:
        places.append((Range(begin, begin + rows.size), rows))
        begin += rows.size
    return places


def _buffer(
    like: Sequence[Tensor], columns: list[Range], zero: bool = False
) -> tuple[Tensor, list[Tensor]]:
    """A flat tensor, and in it a view for these rows of each tensor."""
    count = sum(rows.size for rows in columns)
    shapes = [(*x.shape[:-2], count, x.size(-1)) for x in like]
    sizes = [torch.Size(shape).numel() for shape in shapes]
    dtype = like[0].dtype if like else torch.float32
    flat = (torch.zeros if zero else torch.empty)(sum(sizes), dtype=dtype)
    pieces = flat.split(sizes) if sizes else ()
    return flat, [piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)]


def _selected(tensor: Tensor, columns: list[Range]) -> Tensor:
    """These rows: a view where they are neighbours."""
    if len(columns) == 1:
        return rows_of(tensor, columns[0])
    return torch.cat([rows_of(tensor, rows) for rows in columns or [Range(0, 0)]], -2)
