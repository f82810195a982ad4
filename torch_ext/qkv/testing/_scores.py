"""The scores of attention: all that is decided before the softmax."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from qkv.spans import Spans, tensor_of
from qkv.testing._arguments import check_broadcast, check_key, check_mask, check_numbers


@dataclass(frozen=True)
class Place:
    """Where the tensors of a call lie in a larger problem, of which they are a part: so that a long
    sequence can be computed a few queries at a time.

    first_query, first_key: the numbers of their first rows in it.
    offset: S - L of it; None: of the tensors themselves.
    first_item: the number of their first batch item in it, which matters to dropout and score_mod.
    """

    first_query: int = 0
    first_key: int = 0
    offset: int | None = None
    first_item: int = 0

    def positions(self, L: int, S: int, device: torch.device | str | None = None):
        """int64 `[L, 1]` and `[S]`: the numbers of the queries and of the keys."""
        i = torch.arange(self.first_query, self.first_query + L, device=device)
        return i[:, None], torch.arange(self.first_key, self.first_key + S, device=device)

    def ahead(self, L: int, S: int, device: torch.device | str | None = None) -> Tensor:
        """int64 `[L, S]`: how far each key lies ahead of each query, the last of both being side by
        side: `j - (i + S - L)`."""
        i, j = self.positions(L, S, device)
        return j - (i + (S - L if self.offset is None else self.offset))


def distance(
    L: int, S: int, *, place: Place | None = None, device: torch.device | str | None = None
) -> Tensor:
    """int64 `[L, S]`: `|i + S - L - j|`, what ALiBi's slopes are multiplied by."""
    return (place or Place()).ahead(L, S, device).abs()


def visible(
    L: int,
    S: int,
    is_causal: bool = False,
    window_size: tuple[int, int] | None = None,
    *,
    place: Place | None = None,
    device: torch.device | str | None = None,
) -> Tensor:
    """bool `[L, S]`: which keys their positions let each query see. is_causal is aligned top-left,
    window_size bottom-right; -1 leaves a side open."""
    place = place or Place()
    (i, j), ahead = place.positions(L, S, device), place.ahead(L, S, device)
    left, right = (-1, -1) if window_size is None else window_size
    seen = (i >= j) if is_causal else torch.ones(L, S, dtype=torch.bool, device=device)
    if left >= 0:
        seen = seen & (-ahead <= left)
    return seen & (ahead <= right) if right >= 0 else seen


def attention_scores(
    query: Tensor,
    key: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
    window_size: tuple[int, int] | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    bias: Tensor | None = None,
    spans: Spans | Tensor | None = None,
    indices: Tensor | None = None,
    score_mod: Callable[..., Tensor] | None = None,
    dtype: torch.dtype = torch.float64,
    nonfinite: bool = False,
    place: Place | None = None,
) -> tuple[Tensor, Tensor]:
    """What the softmax is taken of, and which keys each query may see.

    Args:
        query: `[..., H, L, D]`, of any floating dtype.
        key: `[..., H, S, D]`; with enable_gqa `[..., Hkv, S, D]`.
        dtype: what is computed in.
        nonfinite: the tensors may hold NaN and infinity. What is hidden reaches neither result nor
            gradient then, for which every query reads a copy of all keys: memory for H * L * S * D
            numbers.
        place: where the tensors lie in a larger problem.
        score_mod: as in `qkv.flex_attention`. It is called once, with all scores, and with the
            numbers of batch items, heads, queries and keys as tensors that broadcast to them.
        Everything else: as in `qkv.attention`.

    Returns:
        Scores, `[..., H, L, S]` in dtype, -inf where a key is hidden; and bool, True where it is
        not, of a shape that broadcasts to that one.

    Raises:
        ValueError: shapes and numbers that do not fit, by the argument's name.
        TypeError: dtypes that do not fit, likewise.
    """
    check_key(key, query, enable_gqa)
    check_numbers(scale, softcap, window_size)
    L, S = query.size(-2), key.size(-2)
    lead = leading(query, key, enable_gqa)
    seen = visible(L, S, is_causal, window_size, place=place, device=query.device)
    if spans is not None:
        check_mask("spans", in_spans := Spans(tensor_of(spans)).to_mask(S), lead, L, S)
        seen = seen & in_spans
    if indices is not None:
        check_mask("indices", chosen := _chosen(indices, query, S), lead, L, S)
        seen = seen & chosen
    masks = {name: x for name, x in (("attn_mask", attn_mask), ("bias", bias)) if x is not None}
    for name, mask in masks.items():
        check_mask(name, mask, lead, L, S)
        seen = seen & (mask if mask.dtype == torch.bool else mask != -torch.inf)

    query, key = query.to(dtype), key.to(dtype)
    if nonfinite:
        dots = _dots_of_what_is_seen(query, key, seen)
    else:
        dots = query @ repeat_heads(key.mT, query)
    usual = query.size(-1) ** -0.5 if query.size(-1) else 1.0
    # A hidden score is 0 until the end: through the derivatives of softcap, NaN would become NaN.
    scores = (dots * (usual if scale is None else scale)).where(seen, 0)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if score_mod is not None:
        scores = score_mod(scores, *_numbers(scores, place or Place()))
        seen = seen & (scores.detach() != -torch.inf)
        scores = scores.where(seen, 0)
    if alibi_slopes is not None:
        check_broadcast("alibi_slopes", alibi_slopes, lead, "[..., H]")
        slopes = alibi_slopes.to(dtype)[..., None, None]
        scores = scores - slopes * distance(L, S, place=place, device=query.device)
    for mask in masks.values():
        if mask.dtype != torch.bool:
            scores = scores + mask.to(dtype).masked_fill(mask == -torch.inf, 0)
    return scores.masked_fill(~seen, -torch.inf), seen


def _chosen(indices: Tensor, query: Tensor, S: int) -> Tensor:
    """bool `[..., 1 or H, L, S]`: whether a key is among those chosen for a query, of which those
    below 0 are none."""
    places = (indices if indices.dim() == query.dim() else indices.unsqueeze(-3)).long()
    mask = torch.zeros(*places.shape[:-1], S + 1, dtype=torch.bool, device=query.device)
    mask = mask.scatter(-1, places.where(places >= 0, S), True)[..., :S]
    return repeat_heads(mask, query)


def _numbers(scores: Tensor, place: Place) -> tuple[Tensor, ...]:
    """Of the batch items, heads, queries and keys of `[..., H, L, S]`, that broadcast to it."""
    *lead, L, S = scores.shape
    *batch, heads = lead or [1]
    device = scores.device
    items = torch.arange(math.prod(batch), device=device).view(*batch, 1, 1, 1) + place.first_item
    items = items if batch else items.reshape(())
    return items, torch.arange(heads, device=device)[:, None, None], *place.positions(L, S, device)


def repeat_heads(x: Tensor, query: Tensor) -> Tensor:
    """x `[..., Hkv, S, D]` with a head for each head of query; as it is where their heads are as
    many or broadcast."""
    if query.dim() < 3 or x.dim() < 3:
        return x
    heads, kv_heads = query.size(-3), x.size(-3)
    is_grouped = heads not in (1, kv_heads) and kv_heads != 1
    return x.repeat_interleave(heads // kv_heads, -3) if is_grouped else x


def leading(query: Tensor, x: Tensor, enable_gqa: bool) -> tuple[int, ...]:
    """The batch and the heads, `[..., H]`, of query and of x, key or value, together."""
    if enable_gqa and query.dim() > 2 and x.dim() > 2:
        return (*torch.broadcast_shapes(query.shape[:-3], x.shape[:-3]), query.size(-3))
    return torch.broadcast_shapes(query.shape[:-2], x.shape[:-2])


def _dots_of_what_is_seen(query: Tensor, key: Tensor, seen: Tensor) -> Tensor:
    """query @ key.mT, in which every query multiplies copies of the keys that are 0 where it may
    not see them, and a query that sees none is 0 itself."""
    copies = repeat_heads(key, query)[..., None, :, :].where(seen[..., None], 0)
    query = query.where(seen.any(-1, keepdim=True), 0)
    return (query[..., None, :] * copies).sum(-1)
