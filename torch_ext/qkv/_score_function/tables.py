"""Captured tensors as the tables that a score program reads."""

import inspect
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import get_unwrapped
from torch._C._functorch import is_functorch_wrapped_tensor as _is_wrapped

from qkv._watched import is_recorded


def joined(parts: list[Tensor]) -> Tensor | None:
    return torch.cat(parts) if len(parts) > 1 else parts[0] if parts else None


def flat(x: Tensor) -> Tensor:
    """As a table. Each process needs the whole of a DTensor, and torch flattens none whose parts
    are of different sizes."""
    if any(placement.is_shard() for placement in getattr(x, "placements", ())):
        from torch.distributed.tensor import Replicate

        whole = [Replicate() if p.is_shard() else p for p in x.placements]  # type: ignore
        x = x.redistribute(placements=whole)  # type: ignore
    # A recorded program gets tables of other sizes, too, for the operator to refuse by name; but
    # under vmap of no samples torch can infer no size.
    return x.flatten() if _is_wrapped(x) else x.reshape(-1)


def name_of(x: Tensor, function: Any) -> str:
    """What the function calls a captured tensor, for errors."""
    if inspect.isfunction(function) or inspect.ismethod(function):
        captured = inspect.getclosurevars(function)
        for name, value in {**captured.nonlocals, **captured.globals}.items():
            if value is x:
                return f"'{name}'"
    return f"a captured tensor of shape {list(x.shape)}"


def in_int32(x: Tensor, function: Any) -> Tensor:
    """Raises:
    ValueError: a number that is none of int32.
    """
    all_samples = x  # The numbers are not those of one sample, under torch.func.vmap.
    while _is_wrapped(all_samples):
        all_samples = get_unwrapped(all_samples)
    if x.dtype == torch.int64 and all_samples.numel() and _is_plain(all_samples):
        low, high = (int(end) for end in all_samples.aminmax())
        if low < -(2**31) or high >= 2**31:
            end = low if low < -(2**31) else high
            what = f"score_mod: {name_of(x, function)} has {end} in it"
            raise ValueError(f"{what}, but numbers of int32 are expected")
    return x.to(torch.int32)


def _is_plain(x: Tensor) -> bool:
    """Whether it has numbers, and is of no mode or transform that ends."""
    is_tensor = type(x) in (Tensor, torch.nn.Parameter) and not _is_wrapped(x)
    modes = (
        torch._C._len_torch_dispatch_stack() or torch._ops._len_torch_dispatch_stack_pre_dispatch()
    )
    return is_tensor and not modes


def _is_own(x: Tensor) -> bool:
    return x.layout == torch.strided and x.untyped_storage().resizable() and not x.is_shared()


class Remembered:
    """What was last made of some tensors, a tensor or a number, for as long as these live and
    nothing is written to them. Nothing is kept of memory that numpy or another process has, too:
    of what they write torch has no version."""

    def __init__(self) -> None:
        self._last: tuple[list[weakref.ref[Tensor]], list[tuple[int, int]], Any] | None = None

    def of(self, tensors: list[Tensor], make: Callable[[], Any]) -> Any:
        # What records has to see how they are made, or they become constants of what it records.
        is_lasting = all(_is_plain(x) and not x.is_inference() and _is_own(x) for x in tensors)
        if is_recorded() or not is_lasting:
            return make()
        # `x.data = y` is no new version.
        versions, last = [(x._version, x.data_ptr()) for x in tensors], self._last
        if last is not None and last[1] == versions:
            if all(of() is x for of, x in zip(last[0], tensors, strict=True)):
                return last[2]
        made = make()
        if not isinstance(made, Tensor) or (_is_plain(made) and not made.is_inference()):
            self._last = [weakref.ref(x, self._forget) for x in tensors], versions, made
        return made

    def _forget(self, _: Any) -> None:
        self._last = None
