"""The sizes of one attention problem, how --shapes spells them, and what they cost."""

import dataclasses
import re
from dataclasses import dataclass

SPELLING = "BxHq[/Hkv]xLxSxD[xDv][c], c for causal; for example 1x32/8x1024x1024x128c"
PATTERN = re.compile(r"(\d+)x(\d+)(?:/(\d+))?x(\d+)x(\d+)x(\d+)(?:x(\d+))?(c?)")
PRODUCTS = {"forward": 1, "backward": 2.5}  # by convention, in units of the two of a forward pass


@dataclass(frozen=True)
class Shape:
    """query [batch, heads, seqlen_q, head_dim], key [batch, kv_heads, seqlen_k, head_dim],
    value [batch, kv_heads, seqlen_k, head_dim_v]."""

    batch: int
    heads: int
    kv_heads: int
    seqlen_q: int
    seqlen_k: int
    head_dim: int
    head_dim_v: int
    is_causal: bool

    @classmethod
    def parse(cls, text):
        """Raises ValueError for text that is not SPELLING."""
        match = PATTERN.fullmatch(text)
        if not match:
            raise ValueError(f"'{text}' is not {SPELLING}")
        *sizes, causal = match.groups()
        heads, head_dim = sizes[1], sizes[5]  # which Hkv and Dv are where they are left out
        B, H, Hkv, L, S, D, Dv = (
            int(size or other)
            for size, other in zip(sizes, (0, 0, heads, 0, 0, 0, head_dim), strict=True)
        )
        if min(B, H, Hkv, L, S, D, Dv) < 1:
            raise ValueError(f"'{text}': every size must be at least 1")
        if H % Hkv:
            raise ValueError(f"'{text}': {Hkv} key/value heads do not divide {H} query heads")
        return cls(B, H, Hkv, L, S, D, Dv, causal == "c")

    def __str__(self):
        heads = f"{self.heads}/{self.kv_heads}" if self.is_grouped else f"{self.heads}"
        sizes = [self.batch, heads, self.seqlen_q, self.seqlen_k, self.head_dim]
        if self.head_dim_v != self.head_dim:
            sizes.append(self.head_dim_v)
        return "x".join(map(str, sizes)) + "c" * self.is_causal

    @property
    def is_grouped(self):
        """Several query heads share a key/value head."""
        return self.heads != self.kv_heads

    @property
    def is_decode(self):
        """One query a head: memory, not arithmetic, is the limit."""
        return self.seqlen_q == 1

    @property
    def scores(self):
        """By convention: a causal mask counted as half of them."""
        scores = self.batch * self.heads * self.seqlen_q * self.seqlen_k
        return scores / 2 if self.is_causal else scores


@dataclass(frozen=True)
class Entry:
    """What is measured: attention without options on a shape that has a name. benchmarks/ has
    entries with an option."""

    name: str
    shape: Shape
    option = "plain"
    products = PRODUCTS  # of each direction that is measured

    def __str__(self):
        return str(self.shape)

    @property
    def reads_memory(self):
        """Memory, not arithmetic, is the limit."""
        return self.shape.is_decode

    def itemsize(self, dtype):
        """Bytes of an element of keys and values."""
        return dtype.itemsize

    def cache_bytes(self, dtype):
        """Of key and value: what decoding has to read."""
        shape = self.shape
        keys = shape.batch * shape.kv_heads * shape.seqlen_k
        return keys * (shape.head_dim + shape.head_dim_v) * self.itemsize(dtype)

    @property
    def scores(self):
        """How many pairs of a query and a key count."""
        return self.shape.scores

    def timed_as(self, name, direction) -> tuple:
        """(entry, direction) of what the call `name` of Case.timed() computes."""
        return self, direction

    def flops(self, direction):
        """By convention."""
        dims = self.shape.head_dim + self.shape.head_dim_v
        return self.products[direction] * 2 * self.scores * dims

    def described(self, dtype):
        """What a run says of the entry in this dtype."""
        return {
            "name": self.name,
            "shape": str(self.shape),
            "option": self.option,
            "sizes": dataclasses.asdict(self.shape),
        }
