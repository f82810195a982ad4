"""What is measured: an option of the operator on a shape."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
import torch.nn.functional as F

import qkv
from qkv.bench.shapes import PRODUCTS as PLAIN_PRODUCTS
from qkv.bench.shapes import Shape

from .call import Call

# What our own time in a direction is compared with, where it is that of another direction.
PLAIN_PASS = {"jvp": "forward", "double_backward": "backward"}
PRODUCTS = PLAIN_PRODUCTS | {"both": 3.5, "jvp": 2.5, "double_backward": 7.5, "backward_twice": 10}


def attention(**inputs):
    return qkv.attention(**inputs)


def sdpa(inputs, grad_output):
    return Call(F.scaled_dot_product_attention, inputs, grad_output)


def no_arguments(shape, randn):
    return {}


@dataclass(frozen=True)
class Option:
    """What an option of the operator is, given a shape: the arguments, and torch's ways to the same
    numbers."""

    # (shape, randn) -> what the call takes besides query, key, value, is_causal and enable_gqa.
    # randn(*sizes) draws a tensor of the case's dtype; what requires grad gets its gradient.
    arguments: Callable[..., dict] = no_arguments
    # torch's: way(inputs, grad_output) -> Call. The fastest is what we are compared with.
    ways: dict[str, Callable] = field(default_factory=dict)
    # shape -> Entry: the call that our own time is compared with.
    base: Callable[[Shape], Any] | None = None
    lengths: Callable[[Shape], list[int]] | None = None  # of packed documents
    scores: Callable[[Shape], float] = lambda shape: shape.scores  # pairs that count
    is_square: bool = False  # needs L == S
    # Ours, of what prepare makes of the case's inputs, as are torch's ways.
    call: Callable[..., torch.Tensor] = attention
    prepare: Callable[[dict], dict] = lambda inputs: inputs
    # Decoding: every query sees every key; keys and values come from memory; forward only.
    is_cold: bool = False
    itemsize: int | None = None  # the bytes of an element of keys and values; None: the dtype's
    refuses: tuple[torch.dtype, ...] = ()  # dtypes of query that the option has not


PLAIN = Option(ways={"SDPA": sdpa})


def plain(shape):
    """The base of options whose own time is compared with the call without them."""
    return Entry("plain", shape)


@dataclass(frozen=True)
class Promise:
    """Of one direction, in float32."""

    at_least: float | None = None  # times torch's speed
    at_most: float | None = None  # times our own time for the base, or the plain pass


@dataclass(frozen=True)
class Entry:
    """An option of the operator, its name and what it is, on a shape; and what is promised of it:
    {direction: Promise}."""

    name: str
    shape: Shape
    option: str = "plain"
    how: Option = PLAIN
    promised: dict[str, Promise] = field(default_factory=dict)

    def __reduce__(self):
        """For another process: an Option has functions that cannot be pickled, but a name."""
        from .options import entry

        return entry, (self.name, self.option, self.shape)

    def __str__(self):
        return str(self.shape) if self.option == "plain" else f"{self.option}:{self.shape}"

    @property
    def base(self):
        """What our own time is compared with, or None."""
        return self.how.base(self.shape) if self.how.base else None

    @property
    def reads_memory(self):
        """Memory, not arithmetic, is the limit."""
        return self.how.is_cold or (self.option == "plain" and self.shape.is_decode)

    def cache_bytes(self, dtype):
        """Of key and value: what decoding has to read."""
        return self.shape.cache_elements * (self.how.itemsize or dtype.itemsize)

    def flops(self, direction):
        """By convention."""
        return PRODUCTS[direction] * self.how.scores(self.shape) * self.shape.pair_flops

    def timed_as(self, name, direction) -> tuple:
        """(entry, direction) of what the call `name` of Case.timed() computes."""
        if name != "base":
            return self, direction
        plain = PLAIN_PASS.get(direction)
        return (self, plain) if plain else (self.base, direction)

    def described(self, dtype):
        """What a run says of the entry in this dtype."""
        promised = self.promised if dtype == torch.float32 else {}
        return {
            "name": self.name,
            "shape": str(self.shape),
            "option": self.option,
            "sizes": asdict(self.shape),
            "base": self.base and self.base.name,
            "promised": {direction: asdict(promise) for direction, promise in promised.items()},
        }
