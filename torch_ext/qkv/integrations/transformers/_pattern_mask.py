"""A mask that says what it hides instead of listing it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from qkv.spans import Spans

_aten = torch.ops.aten
_UNCHANGED = (_aten.detach.default, _aten.alias.default)
# Parts of a mask, which are as easily mistaken as the whole.
_VIEWS = (_aten.slice, _aten.select, _aten.expand, _aten.view, _aten.unsqueeze, _aten.squeeze)
# Right for masks that are added, or True where they hide; wrong for this one.
_MISTAKEN = (_aten.add, _aten.add_, _aten.masked_fill, _aten.masked_fill_)


FAR = 1 << 62  # a bound that hides nothing, in places
_TENSORS = ("padding", "lengths", "begins", "documents", "spans", "dense")


@dataclass(frozen=True)
class Band:
    """The keys j that query i may see by their places alone: `low <= j - i <= high`."""

    low: int = -FAR
    high: int = FAR

    def __and__(self, other: "Band") -> "Band":
        return Band(max(self.low, other.low), min(self.high, other.high))

    def within(self, queries: int, keys: int, ahead: int) -> "Band":
        """The same band for so many queries and keys, without bounds that hide nothing there. The
        first query's place is so many `ahead` of the first key's."""
        low, high = self.low + ahead, self.high + ahead
        return Band(low if low > 1 - queries else -FAR, high if high < keys - 1 else FAR)

    def window(self, queries: int, keys: int) -> tuple[int, tuple[int, int]] | None:
        """(how many of the keys take part, the `window_size` that is this band over them), or None
        where no window is."""
        keys = min(keys, queries + self.high)  # no query sees those behind
        left, right = keys - queries - self.low, self.high - (keys - queries)
        if keys <= 0 or left < 0:  # a window hides no first keys
            return None
        return keys, (-1 if self.low == -FAR else left, -1 if self.high == FAR else right)


class PatternMask(torch.Tensor):
    """A boolean mask `[B, 1, L, S]`, True where a query may see a key, that is not in memory.

    It is True where all of these are: `band`, by the places of query and key; `padding[b, j]`, bool
    `[B, S]`, unless None; `documents[b, i] == documents[b, j]`, whole numbers `[B, L]` that never
    fall, unless None, which needs L = S; `spans`, as in qkv.attention, unless None. `lengths`,
    `[B]`, say the same as padding, as row b's first `lengths[b]` keys, where that is so and nothing
    else hides; `begins`, `[B]`, as its keys from `begins[b]` to the last one of the band, where
    that is so and there are no spans. Where there is a `dense` one, `[B, 1, L, S]` in memory, that
    is the mask, which no model may mistake either.

    To whatever a model does with it it is a tensor like any other: for the first operation that
    is not a mere copy of the mask, it is written out. It goes by its pattern as before, so that a
    layer does the same when checkpointing computes it again, until it or a view of it may be
    written to: from then on it is `changed`, and `dense` is what counts."""

    band: Band
    padding: Tensor | None
    lengths: Tensor | None
    begins: Tensor | None
    documents: Tensor | None
    spans: Tensor | None
    dense: Tensor | None
    nothing: Tensor
    changed: bool
    moves: bool  # the band, with each step that adds keys to a cache

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(
        cls, shape: Sequence[int], band: Band = Band(), changed: bool = True,
        **tensors: Tensor | None,
    ) -> "PatternMask":  # fmt: skip
        mask = torch.Tensor._make_wrapper_subclass(
            cls, shape, dtype=torch.bool, device=torch.device("cpu")
        )
        mask.band, mask.nothing = band, tensors.get("nothing", torch.empty(0))
        for name in _TENSORS:
            setattr(mask, name, tensors.get(name))
        mask.changed = changed and mask.dense is not None
        mask.moves = band not in (Band(), Band(high=0)) and shape[2] != shape[3]
        return mask

    def __init__(self, *args: Any, **tensors: Any) -> None:
        """Nothing is left to do."""

    @property
    def written(self) -> Tensor:
        """The mask in memory, bool `[B, 1, L, S]`; written once, whoever asks. torch.compile takes
        what an attribute is for an input."""
        if self.dense is not None:
            return self.dense
        batch, _, queries, keys = self.shape
        step = torch.arange(keys) - torch.arange(queries)[:, None]
        mask = ((step >= self.band.low) & (step <= self.band.high))[None, None]
        if self.padding is not None:
            mask = mask & self.padding[:, None, None, :]
        if self.documents is not None:
            same = self.documents[:, :, None] == self.documents[:, None, :]
            mask = mask & same[:, None]
        if self.spans is not None:
            mask = mask & Spans(self.spans).to_mask(keys)
        self.dense = mask.expand(batch, 1, queries, keys)
        return self.dense

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func in _UNCHANGED or _takes_all(func, args):
            return PatternMask(args[0].shape, **vars(args[0]))
        if func.overloadpacket in _MISTAKEN:
            raise NotImplementedError(
                f'attn_implementation="qkv": a model that computes attention itself calls '
                f"{func} with a mask that is True where a query may see a key; use "
                '"eager" for this model'
            )
        is_view = func.overloadpacket in _VIEWS

        def dense_of(mask: PatternMask) -> Tensor:
            mask.changed |= is_view or func._schema.is_mutable
            return mask.written

        dense = tree_map_only(PatternMask, dense_of, (args, kwargs or {}))
        result = func(*dense[0], **dense[1])
        return PatternMask(result.shape, dense=result) if is_view else result

    def __repr__(self, **_: Any) -> str:
        parts = [f"{list(self.shape)}", f"band={self.band}"]
        parts += [name for name in _TENSORS if getattr(self, name) is not None]
        return f"PatternMask({', '.join(parts)})"

    # What torch.compile has to know: the tensors inside, of which it wants at least one, and the
    # rest. Layers may be compiled one by one, and have a mask from outside. One that moves is given
    # written out, or each step would be compiled anew.

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        if self.moves:
            return ["nothing", "written"], None
        inner = [name for name in _TENSORS if getattr(self, name) is not None]
        return ["nothing", *inner], self.band

    @staticmethod
    def __tensor_unflatten__(inner, band, outer_size, outer_stride) -> "PatternMask":
        if band is not None:
            return PatternMask(outer_size, band, **inner)
        mask = PatternMask(outer_size, dense=inner["written"], nothing=inner["nothing"])
        mask.moves = True
        return mask


def lengths_of(padding: Tensor | None) -> Tensor | None:
    """How many keys each row has, where those it has come first."""
    if padding is None:
        return None
    lengths = padding.sum(1)
    first = torch.arange(padding.shape[1]) < lengths[:, None]
    return lengths if torch.equal(first, padding) else None


def begins_of(padding: Tensor | None, keys: int) -> Tensor | None:
    """How many of the first `keys` keys each row lacks, where those it has come last."""
    lengths = lengths_of(None if padding is None else padding[:, :keys].flip(1))
    return None if lengths is None else keys - lengths


def _takes_all(operator: Any, args: tuple) -> bool:
    """Whether the operator is a slice of a mask that leaves nothing out, which is how models cut
    masks to the length of the keys."""
    if operator is not _aten.slice.Tensor:
        return False
    dim, start, end, step = (*args[1:], *(0, None, None, 1)[len(args) - 1 :])
    return not start and (end is None or end >= args[0].shape[dim]) and step == 1
