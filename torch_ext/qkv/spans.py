"""Which keys a query may see, said by a few intervals instead of a number for every pair."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from qkv._block_mask import ends_of
from qkv._intervals import merged, runs_of_mask
from qkv._refuse import refuse
from qkv._watched import untraced

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

__all__ = ["Spans"]

_NOT_COMPILED = (
    "spans is a BlockMask that no call has had before, but where a whole graph is compiled or "
    "exported Spans.from_block_mask of it, made before, is expected"
)


@dataclass(frozen=True, eq=False)
class Spans:
    """The keys that each query may see, as intervals of them: the argument `spans` of `attention`
    and of all that is like it. Made once, for all layers of a model; of a sequence of 4096 it takes
    32 kB for each span, where a boolean mask takes 16 MB.

    tensor: int32 `[..., H or 1, L, 2 n]`, begins and ends, `begin_1, end_1, begin_2, end_2, ...`.
    Query i sees key j if `begin <= j < end` for any of its n spans. Spans may be empty, may overlap
    and may stand in any order; 0 <= begin <= end <= S.

    `a & b` are the keys that both show, `a | b` those that one of them does.

    Example:
        >>> ids = torch.tensor([0] * 300 + [1] * 200 + [2] * 524)  # three documents
        >>> query, key, value = torch.randn(3, 1, 8, 1024, 64)
        >>> spans = qkv.Spans.documents(ids)
        >>> output = qkv.attention(query, key, value, is_causal=True, spans=spans)

    Source: intervals as cuDNN's and PyTorch's FlashMask have them; Wang et al., "FlashMask:
    efficient and rich mask extension of FlashAttention", 2024.
    """

    tensor: Tensor

    @property
    def count(self) -> int:
        """n, how many spans a query has."""
        return self.tensor.size(-1) // 2

    @staticmethod
    def documents(ids: Tensor) -> "Spans":
        """Each position sees those of its own document. ids: `[L]` or `[B, L]`, integers that are
        equal within a document, which lies in one piece. For causal attention pass is_causal, too.

        Raises:
            ValueError: a document in more than one piece.
        """
        begins, ends = _runs(ids)
        pieces = (begins == torch.arange(ids.size(-1), device=ids.device)).sum(-1)
        documents = (ids.sort(-1).values.diff(dim=-1) != 0).sum(-1) + min(1, ids.size(-1))
        if not pieces.equal(documents):
            raise ValueError(
                "Spans.documents: ids has a document in more than one piece, but all positions of "
                "a document are expected to follow each other; see Spans.from_mask"
            )
        return _one(begins, ends)

    @staticmethod
    def groups(ids: Tensor) -> "Spans":
        """Neighbouring positions of equal ids see each other; those whose id is negative see
        nothing. `Spans.groups(ids) | Spans.window(L, right=0)` is causal attention in which the
        tokens of an image, too, see all others of it, as in Gemma 3. ids: `[L]` or `[B, L]`."""
        begins, ends = _runs(ids)
        return _one(begins, ends.where(ids >= 0, begins))

    @staticmethod
    def prefix(sizes: int | Tensor, seqlen: int) -> "Spans":
        """The first positions see each other, and every later one all up to itself: a prefix LM.
        sizes: how many there are; or int `[B]`, of each batch item."""
        sizes = sizes if isinstance(sizes, Tensor) else torch.tensor(sizes)
        ends = torch.arange(1, seqlen + 1, device=sizes.device).maximum(sizes[..., None])
        return _one(torch.zeros_like(ends), ends.clamp(max=seqlen))

    @staticmethod
    def chunks(size: int, seqlen: int) -> "Spans":
        """Each position sees those of its own chunk, of `size` positions each, as in the local
        layers of Llama 4, which pass is_causal, too."""
        if size < 1:
            refuse("Spans.chunks: size", size, "1 or more is expected")
        begins = torch.arange(seqlen) // size * size
        return _one(begins, (begins + size).clamp(max=seqlen))

    @staticmethod
    def window(
        seqlen: int, left: int = -1, right: int = -1, *, first: int = 0, seqlen_k: int | None = None
    ) -> "Spans":
        """Query i of L = `seqlen` sees keys `i + S - L - left` to `i + S - L + right`; -1 leaves a
        side open. That is window_size of the functions; with `first` also Longformer's global
        tokens: so many keys at the beginning are seen by all queries, and, where L is S, so many
        queries see all keys. seqlen_k: S; L if None.

        Raises:
            ValueError: left or right below -1, first below 0.
        """
        for name, number, least in (("left", left, -1), ("right", right, -1), ("first", first, 0)):
            if number < least:
                refuse(f"Spans.window: {name}", number, f"{least} or more is expected")
        S = seqlen if seqlen_k is None else seqlen_k
        i = torch.arange(seqlen) + (S - seqlen)
        begins = (i - left).clamp(0, S) if left >= 0 else torch.zeros_like(i)
        ends = (i + right + 1).clamp(0, S) if right >= 0 else torch.full_like(i, S)
        spans = _one(begins, ends.maximum(begins))
        if first == 0:
            return spans
        is_global = torch.arange(seqlen) < (first if S == seqlen else 0)
        return spans | _one(torch.zeros_like(i), torch.where(is_global, S, min(first, S)))

    @staticmethod
    def neighborhood(
        sizes: Sequence[int],
        kernel: int | Sequence[int],
        dilation: int | Sequence[int] = 1,
        is_causal: bool | Sequence[bool] = False,
    ) -> "Spans":
        """Each point of a grid of these sizes, row by row, sees the `kernel` points around it along
        each dimension, every `dilation`-th; at the edges as many as elsewhere, the nearest ones;
        along a causal dimension those up to its own place. In one, two and three dimensions that is
        what NATTEN calls na1d, na2d and na3d. Of a kernel of even size k, k / 2 points lie before
        the own one. There is a span for each row of a window, and for each point with dilation
        along the rows.

        Raises:
            ValueError: a kernel that, times its dilation, is larger than the grid.

        Source: Hassani et al., "Neighborhood attention transformer", 2023.
        """
        begins, hidden = torch.zeros(1, 1, dtype=torch.int64), torch.zeros(1, 1, dtype=torch.bool)
        widths, rank = torch.ones(1, dtype=torch.int64), len(sizes)
        given = {"kernel": kernel, "dilation": dilation, "is_causal": is_causal}
        of_each = {n: x if isinstance(x, Sequence) else (x,) * rank for n, x in given.items()}
        for name, x in of_each.items():
            if len(x) != rank:
                wanted = f"one for all dimensions or {rank} are expected, as many as sizes has"
                refuse(f"Spans.neighborhood: {name}", x, wanted)
        for d, (size, k, step, causal) in enumerate(zip(sizes, *of_each.values(), strict=True), 1):
            if k < 1 or step < 1 or k * step > size:
                raise ValueError(
                    f"Spans.neighborhood: kernel {k} with dilation {step} is expected to be 1 or "
                    f"more, and at most {size} when multiplied: sizes is {tuple(sizes)}"
                )
            points = _neighbours(size, k, step, causal)
            if d == rank and step == 1:  # one span
                widths, points = (points >= 0).sum(-1), points.clamp(min=0)[:, :1]
            begins = begins[:, None, :, None] * size + points[:, None, :]
            hidden = hidden[:, None, :, None] | (points[:, None, :] < 0)
            begins, hidden = (x.flatten(2).flatten(0, 1) for x in (begins, hidden))
        ends = begins + widths.repeat(len(begins) // len(widths))[:, None]
        return _of(*merged("neighborhood", begins, ends.where(~hidden, begins)))

    @staticmethod
    def tree(parents: Sequence[int] | Tensor, first: int = 0) -> "Spans":
        """Each node of a tree sees itself and those above it: drafts of a text that are verified at
        once. parents: `[L]`, smaller numbers than the node's own, -1 for a root. first: how many
        keys before the tree are seen by all, such as the text so far in a cache.

        Source: Miao et al., "SpecInfer", 2024.
        """
        parents = torch.as_tensor(parents, device="cpu")
        if parents.dim() != 1:
            refuse("Spans.tree: parents", parents, "[L] is expected")
        if first < 0:
            refuse("Spans.tree: first", first, "0 or more is expected")
        numbers = parents.tolist()
        seen = torch.eye(len(numbers), dtype=torch.bool, device="cpu")
        seen = torch.nn.functional.pad(seen, (first, 0), value=True)
        for i, parent in enumerate(numbers):
            if not -1 <= parent < i:
                refuse(f"Spans.tree: parents[{i}]", parent, f"-1 to {i - 1} is expected")
            if parent >= 0:
                seen[i] |= seen[parent]
        return Spans.from_mask(seen)

    @staticmethod
    def from_mask(mask: Tensor) -> "Spans":
        """Of a boolean mask `[..., L, S]`, True where a query may attend to a key.

        Raises:
            ValueError: a query with more than 64 runs of keys that it sees.
        """
        if mask.dtype != torch.bool or mask.dim() < 2:
            found = f"{mask.dtype}, {[*mask.shape]}"
            refuse("Spans.from_mask: mask", found, "bool [..., L, S] is expected")
        return _of(*runs_of_mask("from_mask", mask))

    @staticmethod
    def from_block_mask(block_mask: "BlockMask") -> "Spans":
        """Of FlexAttention's BlockMask, whose function is evaluated for the pairs of its partial
        blocks alone. The functions that take spans take a BlockMask, too, which remembers these."""
        tensor = _of(*merged("from_block_mask", *ends_of(block_mask))).tensor
        while tensor.dim() > 2 and tensor.size(0) == 1:  # a query may have neither batch nor heads
            tensor = tensor[0]
        return Spans(tensor)

    def to_mask(self, seqlen_k: int) -> Tensor:
        """The same as a boolean mask, `[..., L, S]`."""
        keys = torch.arange(seqlen_k, device=self.tensor.device)
        seen = torch.zeros_like(keys, dtype=torch.bool).repeat(*self.tensor.shape[:-1], 1)
        for span in self.tensor[..., None].unflatten(-2, (-1, 2)).unbind(-3):
            seen = seen | (span[..., 0, :] <= keys) & (keys < span[..., 1, :])
        return seen

    def __or__(self, other: "Spans") -> "Spans":
        (a, b), (c, d) = _together(self, other)
        return _of(*merged("|", torch.cat([a, c], -1), torch.cat([b, d], -1)))

    def __and__(self, other: "Spans") -> "Spans":
        (a, b), (c, d) = _together(self, other)
        begins, ends = a[..., None].maximum(c[..., None, :]), b[..., None].minimum(d[..., None, :])
        return _of(*merged("&", begins.flatten(-2), ends.flatten(-2)))


pytree.register_dataclass(Spans, serialized_type_name="qkv.Spans")


def tensor_of(spans: Any) -> Any:
    """What the operators take of an argument `spans`, whose dtype and shape they judge.

    Raises:
        TypeError: what is no Spans, no BlockMask and no tensor.
    """
    if spans is None:
        return None
    if isinstance(spans, torch.fx.Proxy):  # which has every attribute: asked when the graph runs
        return spans.tracer.create_proxy("call_function", tensor_of, (spans,), {})
    found = _remembered(spans) if hasattr(spans, "kv_num_blocks") else spans
    found = found.tensor if isinstance(found, Spans) else found
    if not isinstance(found, Tensor):
        wanted = "qkv.Spans, FlexAttention's BlockMask or an int32 tensor is expected"
        refuse("spans", repr(spans), wanted, TypeError)
    return found


def _remembered(block_mask: Any) -> Spans:
    if not hasattr(block_mask, "_qkv_spans"):
        make: Any = _made
        if torch.compiler.is_compiling():  # how many spans there are depends on data
            if not torch.compiler.is_dynamo_compiling():
                raise RuntimeError(_NOT_COMPILED)
            torch._dynamo.graph_break(msg=_NOT_COMPILED)
            make = torch.compiler.disable(make)
        block_mask._qkv_spans = make(block_mask)
    return block_mask._qkv_spans


def _made(block_mask: Any) -> Spans:
    """Of a tensor that any later call may take, whatever the one that asks is in."""
    outside = (temporarily_clear_interpreter_stack(), _disable_current_modes(), untraced())
    with torch.inference_mode(False), outside[0], outside[1], outside[2]:
        return Spans.from_block_mask(block_mask)


def _of(begins: Tensor, ends: Tensor) -> Spans:
    """begins and ends: `[..., L, n]`."""
    return Spans(torch.stack([begins, ends], -1).flatten(-2).int())


def _one(begins: Tensor, ends: Tensor) -> Spans:
    """One span for each query: `[L]`, or `[B, L]` of all heads."""
    begins, ends = (x[..., None] if x.dim() < 2 else x[:, None, :, None] for x in (begins, ends))
    return _of(begins, ends)


def _runs(ids: Tensor) -> tuple[Tensor, Tensor]:
    """Of each position, where the neighbours that have its id begin and end."""
    L = ids.size(-1)
    places = torch.arange(L, device=ids.device).expand(ids.shape)
    changes = torch.nn.functional.pad(ids.diff(dim=-1) != 0, (1, 1), value=True)
    begins = places.where(changes[..., :L], 0).cummax(-1).values
    ends = (places + 1).where(changes[..., 1:], L).flip(-1).cummin(-1).values.flip(-1)
    return begins, ends


def _neighbours(size: int, kernel: int, dilation: int, is_causal: bool | int) -> Tensor:
    """`[size, kernel]`: the points along one dimension that each point sees; negative: none."""
    i = torch.arange(size)
    own, rest = i // dilation, i % dilation  # of every dilation-th point, which number it is
    first = own - kernel + 1
    if not is_causal:
        count = (size - rest + dilation - 1) // dilation
        first = (own - kernel // 2).clamp(min=0).minimum(count - kernel)
    return (first[:, None] + torch.arange(kernel)) * dilation + rest[:, None]


def _together(a: Spans, b: Spans) -> list[tuple[Tensor, ...]]:
    """begins and ends of both, `[..., L, n]`, with the same dimensions before n."""
    shape = torch.broadcast_shapes(a.tensor.shape[:-1], b.tensor.shape[:-1])
    return [x.tensor.expand(*shape, -1).unflatten(-1, (-1, 2)).unbind(-1) for x in (a, b)]
