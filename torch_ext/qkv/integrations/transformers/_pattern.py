"""What the mask functions of transformers mean, whose code is known."""

from collections.abc import Callable, Mapping
from functools import reduce
from inspect import getclosurevars
from operator import and_, or_
from types import CodeType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import masking_utils

from qkv.integrations.transformers._pattern_mask import FAR, Band
from qkv.spans import Spans


class Pattern(NamedTuple):
    """What a mask function means: a pair is seen where all of these allow it."""

    band: Band = Band()  # over places
    documents: Tensor | None = None
    spans: Callable[[int], Spans] | None = None  # of so many places, for queries and keys alike

    def as_spans(self, places: int) -> Spans:
        """All of it as spans of so many places."""
        left, right = (-1 if abs(x) == FAR else x for x in (-self.band.low, self.band.high))
        spans = [Spans.window(places, left, right)]
        spans += [] if self.documents is None else [Spans.documents(self.documents)]
        spans += [] if self.spans is None else [self.spans(places)]
        return reduce(and_, spans)


Cells = Mapping[str, Any]  # what a closure was made with, by name


def pattern_of(function: Callable) -> Pattern | None:
    """What a mask function of transformers means, or None if that is not known.

    A closure is known by its code, which is that of the function in transformers that makes such
    closures; the numbers and tensors it was made with are in its cells."""
    read = _KNOWN.get(_code_of(function))
    return read and read(getclosurevars(function).nonlocals)


def _all_of(cells: Cells) -> Pattern | None:
    """Functions that all have to allow a pair."""
    found = [pattern_of(f) for f in cells["mask_functions"] if _code_of(f) is not _REMAPPED]
    remapped = [f for f in cells["mask_functions"] if _code_of(f) is _REMAPPED]
    documents = [x.documents for x in found if x is not None and x.documents is not None]
    for inner in (getclosurevars(f).nonlocals for f in remapped):
        if len(documents) != 1 or not _goes_on(inner["position_ids"], documents[0]):
            return None
        pattern = pattern_of(inner["mask_function"])  # a band alone means the same in all documents
        found.append(pattern if pattern and pattern[1:] == (None, None) else None)
    known = [x for x in found if x is not None]
    if len(known) < len(found) or len(documents) > 1:
        return None
    spans = [x.spans for x in known if x.spans is not None]
    return Pattern(
        reduce(and_, (x.band for x in known)), documents[0] if documents else None,
        (lambda places: reduce(and_, (x(places) for x in spans))) if spans else None,
    )  # fmt: skip


def _any_of(cells: Cells) -> Pattern | None:
    """Functions of which one has to allow a pair."""
    found = [pattern_of(f) for f in cells["mask_functions"]]
    known = [x for x in found if x is not None]
    if len(known) < len(found):
        return None
    return Pattern(spans=lambda places: reduce(or_, (x.as_spans(places) for x in known)))


def _of_chunks(cells: Cells) -> Pattern:
    size, before = cells["chunk_size"], cells["left_padding"][:, None]
    return Pattern(spans=lambda n: Spans.documents((torch.arange(n) - before) // size))


def _of_blocks(cells: Cells) -> Pattern:
    def spans(places: int) -> Spans:
        ids = cells["block_sequence_ids"][:, :places]
        # Refuses a block in several pieces; what is in none is a document for each place here.
        Spans.documents(ids.where(ids >= 0, -1 - torch.arange(places)))
        return Spans.groups(ids)

    return Pattern(spans=spans)


def _goes_on(places: Tensor, documents: Tensor) -> bool:
    """Whether places, `[B, L]`, go up by one within each document. Then two of them are as far
    apart as in the row as a whole, and a band means the same over either."""
    if places.shape != documents.shape:
        return False
    return bool(((places.diff(dim=-1) == 1) | (documents.diff(dim=-1) != 0)).all())


def _code_of(function: Callable) -> CodeType | None:
    return getattr(function, "__code__", None)


def _of_window(band: Callable[[int], Band]) -> Callable[[Cells], Pattern | None]:
    def read(cells):
        window = cells["sliding_window"]
        return Pattern(band(window)) if isinstance(window, int) and window > 0 else None

    return read


_REMAPPED: CodeType | None = None
if hasattr(masking_utils, "remap_positions_for_packed_sequence"):
    remap: Callable[..., Any] = masking_utils.remap_positions_for_packed_sequence
    _REMAPPED = remap(None, None).__code__
_KNOWN: dict[CodeType | None, Callable[[Cells], Pattern | None]] = {}


def _learn(read: Callable[[Cells], Pattern | None], maker: str, *args: Any) -> None:
    """What mask functions mean that are made by a function of transformers, for which it is tried
    with these arguments; without any, what that function itself means. What this version does not
    have, or means otherwise than it is read here, is not known, so that a later version costs time
    and not correctness."""
    function = getattr(masking_utils, maker, None)
    if function is None:
        return
    function = function(*args) if args else function
    _KNOWN[function.__code__] = read
    ours = (pattern_of(function) or Pattern()).as_spans(6).to_mask(6).expand(1, 1, 6, 6)
    theirs = masking_utils.sdpa_mask(1, 6, 6, 0, 0, function, allow_is_causal_skip=False)
    if theirs is None or not torch.equal(ours, theirs):
        del _KNOWN[function.__code__]


_documents = torch.tensor([[0, 0, 0, 1, 1, 2]])
_places = torch.tensor([[0, 1, 2, 0, 1, 0]])
_causal = masking_utils.causal_mask_function
_learn(lambda cells: Pattern(Band(high=0)), "causal_mask_function")
_learn(lambda cells: Pattern(), "bidirectional_mask_function")
_learn(_of_window(lambda window: Band(low=1 - window)), "sliding_window_overlay", 2)
_learn(_of_window(lambda w: Band(-w, w)), "sliding_window_bidirectional_overlay", 2)
_learn(
    lambda cells: Pattern(documents=cells["packed_sequence_mask"]),
    "packed_sequence_mask_function", _documents,
)  # fmt: skip
_learn(_all_of, "sliding_window_causal_mask_function", 3)
_learn(_all_of, "packed_sequence_compatibility_function", _causal, _places, _documents)
_learn(_of_chunks, "chunked_overlay", 2, torch.tensor([1]))
_learn(_of_blocks, "blockwise_overlay", torch.tensor([[-1, 0, 0, -1, -1, 1]]))
_learn(_any_of, "or_masks", _causal, masking_utils.sliding_window_overlay(2))
