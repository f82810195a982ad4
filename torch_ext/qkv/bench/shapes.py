"""The sizes of one attention problem, how --shapes spells them, and what they cost; and the grid,
which are sizes as models have them."""

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
        B, H, Hkv, L, S, D, Dv, causal = match.groups()
        B, H, Hkv, L, S, D, Dv = map(int, (B, H, Hkv or H, L, S, D, Dv or D))
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
    def sees_one_key(self):
        """Every query does: its weight is 1 whatever the score, so the gradients of query and key
        are 0, but for rounding."""
        return self.seqlen_k == 1 or (self.is_decode and self.is_causal)

    @property
    def scores(self):
        """By convention: a causal mask counted as half of them."""
        scores = self.batch * self.heads * self.seqlen_q * self.seqlen_k
        return scores / 2 if self.is_causal else scores

    @property
    def pair_flops(self):
        """What the two products of a forward pass take for each pair of a query and a key."""
        return 2 * (self.head_dim + self.head_dim_v)

    def flops(self, direction):
        """By convention: of a "forward" or a "backward" pass."""
        return PRODUCTS[direction] * self.scores * self.pair_flops

    @property
    def cache_elements(self):
        """How many numbers of key and value decoding has to read: all, or where it is causal, which
        is aligned top-left, those of the first key."""
        seqlen_k, dims = 1 if self.is_causal else self.seqlen_k, self.head_dim + self.head_dim_v
        return self.batch * self.kv_heads * seqlen_k * dims


GRID = {
    name: Shape.parse(text)
    for name, text in {
        "vit-s": "8x6x197x197x64",
        "bert": "8x12x512x512x64",
        "gpt2": "4x12x1024x1024x64c",
        "base": "1x8x1024x1024x64",
        "long": "1x8x4096x4096x64c",
        "long1h": "1x1x4096x4096x64",
        "llama": "1x32/8x1024x1024x128c",
        "sd-unet": "2x8x4096x4096x40",
        "tiny": "64x4x16x16x32",
        "cross": "4x8x64x1500x64",
        "d256": "1x8x1024x1024x256c",
        "decode1": "1x32/8x1x4096x128",
        "decode": "8x32/8x1x4096x128",
    }.items()
}


def choose(text, named, parse):
    """What --shapes names, as parts of `text` with commas between them, or all where it is None:
    of `named`, {name: shape}, or what parse(part) makes of it. Raises ValueError."""
    if text is None:
        return tuple(named.values())
    try:
        return tuple(named.get(part) or parse(part) for part in text.split(","))
    except ValueError as error:
        raise ValueError(f"--shapes: {error}; the names are {', '.join(named)}") from None
