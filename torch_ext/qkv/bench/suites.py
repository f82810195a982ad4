"""What is measured, by name. A new suite is a new entry of SUITES."""

from dataclasses import dataclass, field

import torch

from . import ours
from .options import OPTIONS, Option
from .shapes import SPELLING as SHAPE_SPELLING
from .shapes import Shape

SPELLING = (
    f"[OPTION:]{SHAPE_SPELLING}; OPTION one of {', '.join(OPTIONS)}; plain, or for decode cache, "
    "if left out"
)


# What our own time in a direction is compared with, where it is that of another direction.
PLAIN_PASS = {"jvp": "forward", "double_backward": "backward"}
PRODUCTS = {  # by convention, in units of the two of a forward pass
    "forward": 1,
    "backward": 2.5,
    "both": 3.5,
    "jvp": 2.5,
    "double_backward": 7.5,
    "backward_twice": 10,
}


@dataclass(frozen=True)
class Promise:
    """Of one direction, in float32."""

    at_least: float | None = None  # times torch's speed
    at_most: float | None = None  # times our own time for the base, or the plain pass


@dataclass(frozen=True)
class Entry:
    """An option of the operator on a shape, and what is promised of it: {direction: Promise}."""

    name: str
    option: str
    shape: Shape
    promised: dict[str, Promise] = field(default_factory=dict)

    @classmethod
    def parse(cls, text, name=None, promised=None, default="plain"):
        """Raises ValueError for text that is not SPELLING. default: the option if it has none."""
        option, _, spelling = text.rpartition(":")
        option = option or default
        if option not in OPTIONS:
            raise ValueError(f"'{option}' is no option; expected one of {', '.join(OPTIONS)}")
        shape = Shape.parse(spelling)
        if OPTIONS[option].is_square and shape.seqlen_q != shape.seqlen_k:
            raise ValueError(f"'{text}': {option} needs as many keys as queries")
        if OPTIONS[option].is_cold and shape.is_causal:
            raise ValueError(f"'{text}': with {option} every query sees all keys, expected no 'c'")
        return cls(name or text, option, shape, promised or {})

    def __str__(self):
        return str(self.shape) if self.option == "plain" else f"{self.option}:{self.shape}"

    @property
    def how(self) -> Option:
        return OPTIONS[self.option]

    @property
    def base(self):
        """What our own time is compared with, or None."""
        return Entry(*self.how.base(self.shape)) if self.how.base else None

    def flops(self, direction):
        """By convention: of the pairs that count."""
        shape, products = self.shape, PRODUCTS[direction]
        return products * 2 * self.how.scores(shape) * (shape.head_dim + shape.head_dim_v)


@dataclass(frozen=True)
class Suite:
    entries: tuple[Entry, ...]
    directions: tuple[str, ...]  # of those that Call.timed() knows
    dtypes: tuple[torch.dtype, ...] = (torch.float32,)  # where --dtype does not say
    is_decode: bool = False  # memory is the limit, not arithmetic
    remembered: tuple[str, ...] = ()  # the directions whose memory is measured too

    @property
    def has_gradients(self):
        return self.directions != ("forward",)

    @property
    def has_tangents(self):
        return "jvp" in self.directions

    def parse(self, text):
        """An entry that text spells. Raises ValueError for one that is none, or not for this."""
        entry = Entry.parse(text, default="cache" if self.is_decode else "plain")
        if entry.how.is_cold != self.is_decode:
            suite = "another suite" if self.is_decode else "--suite decode"
            raise ValueError(f"'{text}': {entry.option} is for {suite}")
        if self.has_tangents and entry.how.call is not ours.attention:
            raise ValueError(f"'{text}': the derivatives are those of qkv.attention alone")
        return entry


GRID = {
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
}

# name: spelling, then what is promised: times torch's speed at least, times our own time at most.
TRAINING = {
    "plain": ("2x8x1024x1024x64",),
    "dropout": ("dropout:2x8x1024x1024x64", 5, 1.35),
    "bias": ("bias:2x8x1024x1024x64", 2.5),
    "bias-padded": ("bias-padded:2x8x1024x1024x64", None, 1.1),
    "dv96": ("2x8x1024x1024x64x96", 2.5),
    "dv96-padded": ("plain-padded:2x8x1024x1024x64x96",),
    "padding": ("padding:8x8x1024x1024x64", None, 0.8),
    "mask": ("mask:2x8x1024x1024x64", None, 1.15),
    "softcap": ("softcap:2x8x1024x1024x64", None, 1.3),
    "alibi": ("alibi:2x8x1024x1024x64", None, 1.1),
    "slopes": ("slopes:2x8x1024x1024x64",),
    "sinks": ("sinks:2x8x1024x1024x64", None, 1.1),
    "sinks-key": ("sinks-key:2x8x1024x1024x64",),
    "weights": ("weights:2x8x1024x1024x64", None, 1.25),
    "window8k": ("window:1x8x8192x8192x64c", 8),
    "window8k-cut": ("window-cut:1x8x8192x8192x64c",),
    "window32k": ("growth:1x8x32768x32768x64c", None, 4.4),
    "varlen": ("varlen:64x8x1024x1024x64", 2, 1.25),  # 1 / 0.8: the bound is on speed
    "varlen-each": ("varlen-each:64x8x1024x1024x64",),
}

DECODING = {
    "decode": "cache:8x32/8x1x4096x128",
    "decode-4": "cache:8x32/8x4x4096x128",
    "decode-16": "cache:8x32/8x16x4096x128",
    "decode1": "cache:1x32/8x1x4096x128",
    "one-head": "cache:1x8/1x1x65536x128",
    "ungrouped": "cache:4x8x1x4096x128",
    "paged": "paged:8x32/8x1x4096x128",
}

TWICE = ("jvp", "double_backward", "backward_twice")

# name: spelling, then for each direction of TWICE what is promised of it: times torch's speed at
# least, times our own plain pass at most.
DERIVATIVES = {
    "L1024": ("2x8x1024x1024x64", (4, 2.9), (None, 3.4), (2.4, None)),
    "L1024c": ("2x8x1024x1024x64c", (4, 2.9), (None, 3.4), (2.4, None)),
    "L4096": ("2x8x4096x4096x64", (5, 2.9), (None, 3.4), (3.2, None)),
    "L4096c": ("2x8x4096x4096x64c", (5, 2.9), (None, 3.4), (3.2, None)),
    "L16384": ("alone:1x1x16384x16384x64", (None, 2.9), (None, 3.4)),
}


def promises(directions, bounds):
    """{direction: Promise} of (at_least, at_most) for each; of fewer bounds than directions, for
    the first."""
    return {d: Promise(*b) for d, b in zip(directions, bounds, strict=False)}


SUITES = {
    "grid": Suite(
        tuple(Entry.parse(text, name) for name, text in GRID.items()), ("forward", "backward")
    ),
    "options": Suite(
        tuple(
            Entry.parse(text, name, {"both": Promise(*promise)})
            for name, (text, *promise) in TRAINING.items()
        ),
        ("forward", "backward", "both"),
    ),
    "derivatives": Suite(
        tuple(
            Entry.parse(text, name, promises(TWICE, bounds))
            for name, (text, *bounds) in DERIVATIVES.items()
        ),
        TWICE,
        (torch.float32, torch.bfloat16),
        remembered=("jvp", "backward_twice"),
    ),
    "decode": Suite(
        tuple(Entry.parse(text, name) for name, text in DECODING.items()),
        ("forward",),
        (torch.float32, torch.bfloat16, torch.float16),
        is_decode=True,
    ),
}
