"""A mask that says what it hides instead of listing it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

_aten = torch.ops.aten
_UNCHANGED = (_aten.detach.default, _aten.alias.default)
# Parts of a mask, which are as easily mistaken as the whole.
_VIEWS = (_aten.slice, _aten.select, _aten.expand, _aten.view, _aten.unsqueeze, _aten.squeeze)
# Right for masks that are added, or True where they hide; wrong for this one.
_MISTAKEN = (_aten.add, _aten.add_, _aten.masked_fill, _aten.masked_fill_)


@dataclass(frozen=True)
class Band:
    """The keys j that query i may see by their places alone: `low <= j - i <= high`, where None is
    no bound."""

    low: int | None = None
    high: int | None = None

    def __and__(self, other: "Band") -> "Band":
        lows = [x.low for x in (self, other) if x.low is not None]
        highs = [x.high for x in (self, other) if x.high is not None]
        return Band(max(lows, default=None), min(highs, default=None))

    def within(self, queries: int, keys: int, ahead: int) -> "Band":
        """The same band for so many queries and keys, without bounds that hide nothing there. The
        first query's place is so many `ahead` of the first key's."""
        low = None if self.low is None else self.low + ahead
        high = None if self.high is None else self.high + ahead
        return Band(
            None if low is not None and low <= 1 - queries else low,
            None if high is not None and high >= keys - 1 else high,
        )

    def window(self, queries: int, keys: int) -> tuple[int, tuple[int, int]] | None:
        """(how many of the keys take part, the `window_size` that is this band over them), or None
        where no window is."""
        if self.high is not None and queries + self.high < keys:
            keys = queries + self.high  # no query sees those behind
        left = -1 if self.low is None else keys - queries - self.low
        right = -1 if self.high is None else self.high - (keys - queries)
        hides_first_keys = self.low is not None and left < 0
        return None if keys <= 0 or hides_first_keys else (keys, (left, right))


class PatternMask(torch.Tensor):
    """A boolean mask `[B, 1, L, S]`, True where a query may see a key, that is not in memory.

    It is True where all of these are: `band`, by the places of query and key; `padding[b, j]`, bool
    `[B, S]`, unless None; `documents[b, i] == documents[b, j]`, whole numbers `[B, L]` that never
    fall, unless None, which needs L = S. `lengths`, `[B]`, say the same as padding, as row b's
    first `lengths[b]` keys, where that is so and the band is open.

    To whatever a model does with it it is a tensor like any other: for the first operation that
    is not a mere copy of the mask, it is written out, and from then on `dense` is what
    counts, so that whoever writes to a view of it is heard, too."""

    band: Band
    padding: Tensor | None
    lengths: Tensor | None
    documents: Tensor | None
    dense: Tensor | None
    nothing: Tensor

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(
        cls,
        shape: tuple[int, ...],
        band: Band,
        padding: Tensor | None = None,
        documents: Tensor | None = None,
    ) -> "PatternMask":
        mask = torch.Tensor._make_wrapper_subclass(
            cls, shape, dtype=torch.bool, device=torch.device("cpu")
        )
        mask.band = band
        mask.padding = padding
        mask.lengths = _lengths(padding) if padding is not None and band == Band() else None
        mask.documents = documents
        mask.dense = None
        mask.nothing = torch.empty(0)
        return mask

    @staticmethod
    def holding(dense: Tensor) -> "PatternMask":
        """The mask that is in memory already, which no model may mistake either."""
        mask = PatternMask(tuple(dense.shape), Band())
        mask.dense = dense
        return mask

    def written_out(self) -> Tensor:
        """The mask in memory, bool `[B, 1, L, S]`; written once, whoever asks."""
        if self.dense is None:
            self.dense = self._written()
        return self.dense

    def _written(self) -> Tensor:
        batch, _, queries, keys = self.shape
        step = torch.arange(keys) - torch.arange(queries)[:, None]
        mask = torch.ones(1, 1, queries, keys, dtype=torch.bool)
        if self.band.low is not None:
            mask = mask & (step >= self.band.low)
        if self.band.high is not None:
            mask = mask & (step <= self.band.high)
        if self.padding is not None:
            mask = mask & self.padding[:, None, None, :]
        if self.documents is not None:
            same = self.documents[:, :, None] == self.documents[:, None, :]
            mask = mask & same[:, None]
        return mask.expand(batch, 1, queries, keys)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func in _UNCHANGED or _takes_all(func, args):
            mask = args[0]
            return PatternMask._of(tuple(mask.shape), mask.band, vars(mask))
        if func.overloadpacket in _MISTAKEN:
            raise NotImplementedError(
                f'attn_implementation="qkv": a model that computes attention itself calls '
                f"{func} with a mask that is True where a query may see a key; use "
                '"eager" for this model'
            )
        dense = tree_map_only(PatternMask, PatternMask.written_out, (args, kwargs or {}))
        result = func(*dense[0], **dense[1])
        return PatternMask.holding(result) if func.overloadpacket in _VIEWS else result

    def __repr__(self, **_: Any) -> str:
        parts = [f"{list(self.shape)}", f"band={self.band}"]
        parts += [name for name in _TENSORS if getattr(self, name) is not None]
        return f"PatternMask({', '.join(parts)})"

    # What torch.compile has to know: the tensors inside, of which it wants at least one, and the
    # rest. Layers may be compiled one by one, and have a mask from outside.

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        inner = [name for name in _TENSORS if getattr(self, name) is not None]
        return ["nothing", *inner], self.band

    @staticmethod
    def __tensor_unflatten__(inner, band, outer_size, outer_stride) -> "PatternMask":
        return PatternMask._of(outer_size, band, inner)

    @staticmethod
    def _of(shape, band: Band, tensors: Mapping[str, Any]) -> "PatternMask":
        mask = PatternMask(shape, band)
        for name in ("nothing", *_TENSORS):
            setattr(mask, name, tensors.get(name))
        return mask


_TENSORS = ("padding", "lengths", "documents", "dense")


def _lengths(padding: Tensor) -> Tensor | None:
    """How many keys each row has, where those it has come first."""
    lengths = padding.sum(1)
    first = torch.arange(padding.shape[1]) < lengths[:, None]
    return lengths if torch.equal(first, padding) else None


def _takes_all(operator: Any, args: tuple) -> bool:
    """Whether the operator is a slice of a mask that leaves nothing out, which is how models cut
    masks to the length of the keys."""
    if operator is not _aten.slice.Tensor:
        return False
    dim, start, end, step = (*args[1:], *(0, None, None, 1)[len(args) - 1 :])
    return not start and (end is None or end >= args[0].shape[dim]) and step == 1
