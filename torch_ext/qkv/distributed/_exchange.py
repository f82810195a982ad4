"""Keys and values on their way to the queries that see them, and their gradients on their way back.

At step s of n, each rank attends to keys of the rank s places before it, and they come from there
directly: a rank sends to each other what that one sees, and no more, where from neighbour to
neighbour around the ring all would go.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from qkv.distributed._block import heads_of, rows_of
from qkv.distributed._plan import Plan, Range, Step
from qkv.distributed._ranks import Ranks
from qkv.distributed._transport import Messages, receive, send

# The kinds of messages, and what errors call them.
_KEYS, _GRADIENTS = (0, "keys and values"), (1, "gradients of keys and values")


class Visit(NamedTuple):
    """Of one part of the heads a cut of what is seen at one step, and the rows of the own keys that
    another rank sees at the same visit of its own."""

    part: int
    step: int
    seen: Step
    seen_here: list[Range]


class Return(NamedTuple):
    """Gradients of the own keys and values on their way home, to be added to `home` there, and
    others on their way to another rank."""

    home: list[Tensor]
    columns: list[Range]
    coming: Messages
    leaving: Messages

    def finish(self) -> None:
        self.leaving.wait()
        sizes = [rows.size for rows in self.columns]
        for tensor, share in zip(self.home, self.coming.wait(), strict=True):
            for rows, more in zip(self.columns, share.split(sizes, -2), strict=True):
                rows_of(tensor, rows).add_(more)


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
        self._parts, steps = parts, []
        for step in range(ranks.size):
            seen = plan.step(ranks.rank, ranks.around(-step))
            # What the rank that many places further on sees of the own keys.
            here = plan.step(ranks.around(step), ranks.rank)
            count = cuts if step else 1
            steps += [(step, seen.cut(n, count), here.cut(n, count).columns) for n in range(count)]
        self.visits = [Visit(part, *step) for part in range(parts) for step in steps]

    def arrivals(self) -> Iterator[tuple[Visit, list[Tensor]]]:
        """Each visit with its key and value `[..., Hkv, columns, D]`, while those of the next one
        are on their way. They are let go of after the visit."""
        following = self._start(self.visits[0])
        for visit, after in zip(self.visits, [*self.visits[1:], None], strict=True):
            coming, leaving = following
            if after is not None:
                following = self._start(after)
            yield visit, coming.wait()
            for messages in (coming, leaving):
                messages.wait().clear()

    def _own(self, tensors: Sequence[Tensor], part: int) -> list[Tensor]:
        """Views of one part of the heads."""
        return [heads_of("key", x, part, self._parts) for x in tensors]

    def _start(self, visit: Visit) -> tuple[Messages, Messages]:
        """Begins to receive the keys and values of a visit, and to send the own ones to the rank
        that is as many places further on."""
        own = self._own(self._tensors, visit.part)
        leaving = [_selected(x, visit.seen_here) for x in own]
        return self._exchange(own, visit.seen.columns, leaving, visit.step, _KEYS)

    def send_back(self, visit: Visit, shares: list[Tensor], home: Sequence[Tensor]) -> Return:
        """Begins to send gradients of the keys and values of a visit to the rank that they belong
        to, and to receive what another has computed for `home`, the gradients of the own ones: both
        of those that are wanted."""
        own = self._own(home, visit.part)
        messages = self._exchange(own, visit.seen_here, shares, -visit.step, _GRADIENTS)
        return Return(own, visit.seen_here, *messages)

    def _exchange(
        self, like: list[Tensor], columns: list[Range], leaving: list[Tensor], step: int,
        message: tuple[int, str],
    ) -> tuple[Messages, Messages]:  # fmt: skip
        """Messages that come from the rank so many places before this one, with as many rows as
        `columns` of tensors `like` these, and that leave for the one as many places further on."""
        if step == 0:
            return Messages(leaving), Messages([])
        count, leaving = sum(rows.size for rows in columns), [x.contiguous() for x in leaving]
        coming = [x.new_empty(*x.shape[:-2], count, x.size(-1)) for x in like]
        (kind, what), ranks = message, self._ranks
        doing = f"ring_attention: {self._phase}, step {abs(step) + 1} of {ranks.size}:"
        return (
            receive(coming, ranks, ranks.around(-step), kind, f"{doing} receiving {what}"),
            send(leaving, ranks, ranks.around(step), kind, f"{doing} sending {what}"),
        )


def _selected(tensor: Tensor, columns: list[Range]) -> Tensor:
    """These rows: a view where they are neighbours."""
    if len(columns) == 1:
        return rows_of(tensor, columns[0])
    return torch.cat([rows_of(tensor, rows) for rows in columns or [Range(0, 0)]], -2)
