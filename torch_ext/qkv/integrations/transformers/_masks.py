"""The mask function: what transformers calls once in a forward pass (once for each kind of layer)
with a function of batch, head, query and key, to get the mask that it hands to every layer."""

from collections.abc import Callable
from functools import partial, reduce
from operator import and_, or_
from types import CodeType
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from transformers import masking_utils
from transformers.masking_utils import causal_mask_function, sdpa_mask
from transformers.utils.import_utils import is_tracing

from qkv.integrations.transformers._pattern_mask import FAR, Band, PatternMask, lengths_of
from qkv.spans import Spans


def make_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable = causal_mask_function,
    attention_mask: Tensor | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    device: torch.device | str = "cpu",
    **kwargs: Any,
) -> Tensor | None:
    """The mask `[batch_size, 1, q_length, kv_length]`, bool, True where a query may see a key.

    Query i has the place `q_offset + i`, key j the place `kv_offset + j`; mask_function gets
    places. attention_mask is the user's, `[batch_size, places]`, bool, False for padding.

    Returns:
        A `PatternMask`, which no layer can mistake for a mask that is added. Where mask_function is
        made of functions of transformers whose meaning is known, it has no L x S elements. For a
        single query, whose mask is a row anyway, None if it sees all keys and may be without mask,
        else the row. For any other function the whole mask. On other devices and in torch.compile,
        what transformers' `sdpa_mask` returns: `_own_attention` sees to it that none but layers
        that ask the interface get it.
    """

    of_transformers = partial(
        sdpa_mask, batch_size, q_length, kv_length, cast(int, q_offset), kv_offset, mask_function,
        attention_mask, device=device, **kwargs,
    )  # fmt: skip

    def written_out() -> PatternMask:
        mask = of_transformers(allow_is_causal_skip=False)
        assert mask is not None  # it was not allowed to be skipped
        return PatternMask(mask.shape, dense=mask)

    if torch.device(device).type != "cpu" or is_tracing(attention_mask):
        return of_transformers(
            allow_is_causal_skip=allow_is_causal_skip,
            allow_is_bidirectional_skip=allow_is_bidirectional_skip,
        )
    found = _pattern(mask_function)
    if found is None or (attention_mask is not None and attention_mask.dim() != 2):
        return written_out()
    padding = _local_padding(attention_mask, kv_length, kv_offset)
    band = found.band.within(q_length, kv_length, ahead=int(q_offset) - kv_offset)
    window = band.window(q_length, kv_length)
    if window is None:
        return written_out()
    documents, spans = found.documents, None
    if documents is not None:
        shape = (batch_size, q_length) if q_length == kv_length else None
        falls = (documents.diff(dim=-1) < 0).any()
        if padding is not None or found.spans or documents.shape != shape or falls:
            return written_out()
    if found.spans is not None:
        last = int(q_offset) + q_length
        try:
            spans = found.spans(max(last, kv_offset + kv_length)).tensor
        except ValueError:  # more spans of a query than are fast, or a block in several pieces
            return written_out()
        spans = (spans[..., last - q_length : last, :] - kv_offset).clamp(0, window[0])
        if (spans == spans.new_tensor([0, window[0]] * (spans.size(-1) // 2))).all():
            spans = None
    if padding is not None and padding[:, : window[0]].all():
        padding = None
    is_open = band == Band() and spans is None
    lengths = lengths_of(padding) if padding is not None and is_open else None
    mask = PatternMask(
        (batch_size, 1, q_length, kv_length), band,
        padding=padding, lengths=lengths, documents=documents, spans=spans,
    )  # fmt: skip
    if q_length > 1:
        return mask
    may_be_none = allow_is_causal_skip or allow_is_bidirectional_skip
    sees_all = is_open and padding is None
    return None if may_be_none and sees_all else PatternMask(mask.shape, dense=mask.written_out())


def _local_padding(attention_mask: Tensor | None, kv_length: int, kv_offset: int) -> Tensor | None:
    """The padding of the keys that there are, `[batch_size, kv_length]`. Places that attention_mask
    does not reach are hidden, as transformers has it."""
    if attention_mask is None:
        return None
    missing = kv_offset + kv_length - attention_mask.shape[1]
    if missing > 0:
        attention_mask = torch.nn.functional.pad(attention_mask, (0, missing))
    return attention_mask[:, kv_offset : kv_offset + kv_length].bool()


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


def _pattern(function: Callable) -> Pattern | None:
    """What a mask function of transformers means, or None if that is not known.

    A closure is known by its code, which is that of the function in transformers that makes such
    closures; the numbers and tensors it was made with are in its cells."""
    read = _KNOWN.get(_code_of(function))
    return read and read(_cells(function))


def _cells(function: Callable) -> dict[str, Any]:
    cells = function.__closure__ or ()
    return dict(zip(function.__code__.co_freevars, (x.cell_contents for x in cells), strict=True))


def _all_of(cells: dict[str, Any]) -> Pattern | None:
    """Functions that all have to allow a pair."""
    found = [_pattern(f) for f in cells["mask_functions"] if _code_of(f) is not _REMAPPED]
    remapped = [_cells(f) for f in cells["mask_functions"] if _code_of(f) is _REMAPPED]
    documents = [x.documents for x in found if x is not None and x.documents is not None]
    for inner in remapped:
        if len(documents) != 1 or not _goes_on(inner["position_ids"], documents[0]):
            return None
        pattern = _pattern(inner["mask_function"])  # a band alone means the same in all documents
        found.append(pattern if pattern and pattern[1:] == (None, None) else None)
    known = [x for x in found if x is not None]
    if len(known) < len(found) or len(documents) > 1:
        return None
    spans = [x.spans for x in known if x.spans is not None]
    return Pattern(
        reduce(and_, (x.band for x in known)), documents[0] if documents else None,
        (lambda places: reduce(and_, (x(places) for x in spans))) if spans else None,
    )  # fmt: skip


def _any_of(cells: dict[str, Any]) -> Pattern | None:
    """Functions of which one has to allow a pair."""
    found = [_pattern(f) for f in cells["mask_functions"]]
    known = [x for x in found if x is not None]
    if len(known) < len(found):
        return None
    return Pattern(spans=lambda places: reduce(or_, (x.as_spans(places) for x in known)))


def _of_chunks(cells: dict[str, Any]) -> Pattern:
    size, before = cells["chunk_size"], cells["left_padding"][:, None]
    return Pattern(spans=lambda n: Spans.documents((torch.arange(n) - before) // size))


def _of_blocks(cells: dict[str, Any]) -> Pattern:
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


def _of_window(band: Callable[[int], Band]) -> Callable[[dict[str, Any]], Pattern | None]:
    def read(cells):
        window = cells["sliding_window"]
        return Pattern(band(window)) if isinstance(window, int) else None

    return read


_REMAPPED: CodeType | None = None
if hasattr(masking_utils, "remap_positions_for_packed_sequence"):
    _REMAPPED = masking_utils.remap_positions_for_packed_sequence(None, None).__code__
_KNOWN: dict[CodeType | None, Callable[[dict[str, Any]], Pattern | None]] = {}


def _learn(read: Callable[[dict[str, Any]], Pattern | None], maker: str, *args: Any) -> None:
    """What mask functions mean that are made by a function of transformers, for which it is tried
    with these arguments; without any, what that function itself means. What this version does not
    have, or means otherwise than it is read here, is not known, so that a later version costs time
    and not correctness."""
    function = getattr(masking_utils, maker, None)
    if function is None:
        return
    function = function(*args) if args else function
    _KNOWN[function.__code__] = read
    ours = (_pattern(function) or Pattern()).as_spans(6).to_mask(6).expand(1, 1, 6, 6)
    theirs = sdpa_mask(1, 6, 6, 0, 0, function, allow_is_causal_skip=False)
    if theirs is None or not torch.equal(ours, theirs):
        del _KNOWN[function.__code__]


_documents = torch.tensor([[0, 0, 0, 1, 1, 2]])
_places = torch.tensor([[0, 1, 2, 0, 1, 0]])
_learn(lambda cells: Pattern(Band(high=0)), "causal_mask_function")
_learn(lambda cells: Pattern(), "bidirectional_mask_function")
_learn(_of_window(lambda window: Band(low=1 - window)), "sliding_window_overlay", 2)
_learn(_of_window(lambda w: Band(-w, w)), "sliding_window_bidirectional_overlay", 2)
_learn(
    lambda cells: Pattern(documents=cells["packed_sequence_mask"]),
    "packed_sequence_mask_function", _documents,
)  # fmt: skip
_learn(_all_of, "sliding_window_causal_mask_function", 3)
_learn(_all_of, "packed_sequence_compatibility_function", causal_mask_function, _places, _documents)
_learn(_of_chunks, "chunked_overlay", 2, torch.tensor([1]))
_learn(_of_blocks, "blockwise_overlay", torch.tensor([[-1, 0, 0, -1, -1, 1]]))
_learn(_any_of, "or_masks", causal_mask_function, masking_utils.sliding_window_overlay(2))
