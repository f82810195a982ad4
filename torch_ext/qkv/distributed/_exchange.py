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
    """A cut of what is seen at one step, of one part of the heads."""

    part: int
    step: int
    cut: int


@dataclass
class Arrival:
    """Keys and values on their way here, and others on their way to another rank."""

    tensors: list[Tensor]
    transfers: list[Transfer]

    def wait(self) -> list[Tensor]:
        """Key and value `[..., Hkv, columns, D]`, when they are here."""
        for transfer in self.transfers[: len(self.tensors)]:
            transfer.wait()
        return self.tensors

    def finish(self) -> None:
        """Lets go of the memory, when what left has arrived elsewhere."""
        for transfer in self.transfers:
            transfer.wait()
        self.tensors.clear()
        self.transfers.clear()


@dataclass
class Return:
    """Gradients of the own keys and values on their way home, to be added to `home` there."""

    home: list[Tensor]
    columns: list[Range]
    shares: list[Tensor]
    transfers: list[Transfer]

    def finish(self) -> None:
        for transfer in self.transfers:
            transfer.wait()
        for tensor, share in zip(self.home, self.shares, strict=True):
            begin = 0
            for rows in self.columns:
                rows_of(tensor, rows).add_(rows_of(share, Range(begin, begin + rows.size)))
                begin += rows.size


class Exchange:
    """What a rank exchanges with the others, while it visits their keys one after the other.

    Args:
        tensors: key and value `[..., Hkv, L_local, D]`, of the same shapes on all ranks.
        parts, cuts: into how many parts of the heads, and each of these into how many of the rows,
            what is seen at a step is cut. The own keys and values, step 0, only by heads.
        phase: what errors call it.
    """

    def __init__(
        self, tensors: Sequence[Tensor], ranks: Ranks, plan: Plan, parts: int, cuts: int, phase: str
    ):
        self._tensors, self._ranks, self._phase = tensors, ranks, phase
        self._parts, self._cuts = parts, cuts
        steps = range(ranks.size)
        self._steps = [plan.step(ranks.rank, ranks.around(-step)) for step in steps]
        # What the rank that many places further on sees of the own keys.
        self._others_steps = [plan.step(ranks.around(step), ranks.rank) for step in steps]

    def arrivals(self) -> Iterator[tuple[Visit, Arrival]]:
        """Each visit, while the keys and values of the next one are on their way."""
        visits = [
            Visit(part, step, cut)
            for part in range(self._parts)
            for step in range(self._ranks.size)
            for cut in range(self._cuts if step else 1)
        ]
        arriving = self._start(visits[0])
        for number, visit in enumerate(visits):
            current = arriving
            if number + 1 < len(visits):
                arriving = self._start(visits[number + 1])
            yield visit, current
            current.finish()

    def seen(self, visit: Visit) -> Step:
        """What is seen at a visit."""
        return self._steps[visit.step].cut(visit.cut, self._cuts if visit.step else 1)

    def _seen_here(self, visit: Visit) -> list[Range]:
        """The rows of the own keys that another rank sees, at the same visit of its own."""
        return self._others_steps[visit.step].cut(visit.cut, self._cuts).columns

    def _own(self, tensors: Sequence[Tensor], part: int) -> list[Tensor]:
        """Views of one part of the heads."""
        return [heads_of(x, -3, part, self._parts) for x in tensors]

    def _start(self, visit: Visit) -> Arrival:
        """Begins to receive the keys and values of a visit, and to send the own ones to the rank
        that is as many places further on."""
        own, step = self._own(self._tensors, visit.part), visit.step
        columns = self.seen(visit).columns
        if step == 0:
            return Arrival([_selected(x, columns) for x in own], [])
        leaving = [_selected(x, self._seen_here(visit)) for x in own]
        coming = [_room(x, columns) for x in own]
        source, target = self._ranks.around(-step), self._ranks.around(step)
        transfers = self._exchange("keys and values", step, coming, source, leaving, target, _KEYS)
        return Arrival(coming, transfers)

    def send_back(
        self, visit: Visit, shares: Sequence[Tensor | None], home: Sequence[Tensor | None]
    ) -> Return:
        """Begins to send gradients of the keys and values of a visit to the rank that they belong
        to, and to receive what another has computed for `home`, the gradients of the own ones: both
        None where they are not wanted."""
        own, step = self._own([x for x in home if x is not None], visit.part), visit.step
        leaving = [x for x in shares if x is not None]
        if step == 0:
            return Return(own, self.seen(visit).columns, leaving, [])
        columns = self._seen_here(visit)
        coming = [_room(x, columns) for x in own]
        source, target = self._ranks.around(step), self._ranks.around(-step)
        what = "gradients of keys and values"
        transfers = self._exchange(what, step, coming, source, leaving, target, _GRADIENTS)
        return Return(own, columns, coming, transfers)

    def _exchange(
        self, what: str, step: int, coming: list[Tensor], source: int, leaving: list[Tensor],
        target: int, tag: int,
    ) -> list[Transfer]:  # fmt: skip
        """The transfers of what comes, and of what leaves."""
        step_of = f"ring_attention: {self._phase}, step {step + 1} of {self._ranks.size}:"
        receiving, sending = f"{step_of} receiving {what}", f"{step_of} sending {what}"
        return [
            *(receive(x, self._ranks, source, tag, receiving) for x in coming),
            *(send(x.contiguous(), self._ranks, target, tag, sending) for x in leaving),
        ]


def _selected(tensor: Tensor, columns: list[Range]) -> Tensor:
    """These rows: a view where they are neighbours."""
    if len(columns) == 1:
        return rows_of(tensor, columns[0])
    return torch.cat([rows_of(tensor, rows) for rows in columns or [Range(0, 0)]], -2)


def _room(like: Tensor, columns: list[Range]) -> Tensor:
    """For as many rows."""
    count = sum(rows.size for rows in columns)
    return like.new_empty(*like.shape[:-2], count, like.size(-1))
