"""How far a result may be from the truth: as far as torch's own, in the same dtype, is."""

import math
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from qkv._refuse import refuse

# So many units in the last place of the largest element are always allowed: sums of the same
# numbers in another order differ, though neither is better. Half a unit is what rounding a result
# to half precision costs; in float64 the truth itself has been rounded.
ROUNDINGS = {torch.bfloat16: 0.5, torch.float16: 0.5, torch.float32: 8, torch.float64: 64}

Tensors = Tensor | Sequence["Tensors"] | Mapping[str, "Tensors"]


def max_error(actual: Tensor, expected: Tensor) -> float:
    """The largest absolute difference; inf where one is NaN or infinite and the other is not."""
    differences = _differences(actual, expected)
    return differences.max().item() if differences.numel() else 0.0


def rms_error(actual: Tensor, expected: Tensor) -> float:
    """The root mean square of the differences, relative to that of expected's finite numbers unless
    those are 0; inf where one is NaN or infinite and the other is not."""
    error = _differences(actual, expected).norm().item()
    return error / (expected.detach().double().nan_to_num(0, 0, 0).norm().item() or 1.0)


def rounding(expected: Tensor, dtype: torch.dtype) -> float:
    """What `assert_close` allows a result in dtype, however accurate the baseline is: whole numbers
    are not rounded."""
    if dtype not in ROUNDINGS:
        return 0.0
    expected = expected.detach().double().nan_to_num(0, 0, 0)
    largest = expected.abs().max().item() if expected.numel() else 0.0
    return ROUNDINGS[dtype] * torch.finfo(dtype).eps * largest


def assert_close(
    actual: Tensors,
    expected: Tensors,
    baseline: Tensors | None = None,
    *,
    times: float = 1.0,
    name: str = "the result",
) -> None:
    """No element of actual is further from expected than the worst of baseline, but for rounding.

    Args:
        actual: what is judged: a tensor, or a sequence or mapping of tensors, each of which is
            judged by itself.
        expected: the truth, of the same shapes: by `qkv.testing.attention` in float64.
        baseline: the same by torch's own operators in actual's dtype: what may be expected of it.
            None: only rounding is allowed.
        times: how many times baseline's error is allowed.
        name: what actual is called in an error.

    Raises:
        AssertionError: an error is larger, shapes or names differ, or one is NaN or infinite where
            the other is not. It says which tensor, where, and by how much.
    """
    for label, x, truth, torchs in _each(name, actual, expected, baseline):
        error, slack = max_error(x, truth), rounding(truth, x.dtype)
        theirs = 0.0 if torchs is None else _allowed(max_error(torchs, truth), label)
        if error <= times * theirs + slack:
            continue
        at = _differences(x, truth).flatten().argmax()
        place = [int(n) for n in torch.unravel_index(at, truth.shape)]
        found, wanted = (y.detach().flatten()[at].item() for y in (x, truth))
        raise AssertionError(
            f"{label} is off by {error:.3g} at {place}: {found:.6g}, where {wanted:.6g} is "
            f"expected; at most {times * theirs + slack:.3g} is allowed: {times:.3g} times the "
            f"baseline's {theirs:.3g}, and {slack:.3g} for rounding"
        )


def assert_as_accurate(
    actual: Tensors,
    expected: Tensors,
    baseline: Tensors,
    *,
    times: float = 1.02,
    name: str = "the result",
) -> None:
    """The root mean square error of actual is at most `times` that of baseline, with no allowance
    for rounding: for tensors that are large enough for it to be a steady number, thousands of
    elements. Two of one accuracy still differ by a percent or so. Arguments and errors are those of
    `assert_close`.
    """
    for label, x, truth, torchs in _each(name, actual, expected, baseline):
        error, theirs = rms_error(x, truth), _allowed(rms_error(torchs, truth), label)
        if not error <= times * theirs:
            raise AssertionError(
                f"{label} is off by {error:.3g}, root mean square, relative; at most {times:.3g} "
                f"times the baseline's {theirs:.3g} is allowed"
            )


def _allowed(error: float, label: str) -> float:
    """The error of a baseline, which has to be a number."""
    if not math.isfinite(error):
        raise AssertionError(f"the baseline of {label} is NaN or infinite: it allows anything")
    return error


def _each(name: str, actual, expected, baseline) -> Iterator[tuple]:
    """(name, actual, expected, baseline) of every tensor, their shapes being the same."""
    given = {name: actual} | ({} if baseline is None else {f"the baseline of {name}": baseline})
    if isinstance(expected, Tensor):
        for whose, x in given.items():
            if not isinstance(x, Tensor):
                refuse(whose, repr(x), "a tensor is expected", AssertionError)
            if x.shape != expected.shape:
                refuse(whose, x, f"{[*expected.shape]} is expected", AssertionError)
        yield name, actual, expected, baseline
        return
    truths, parts = _named(expected), [_named(x) for x in given.values()]
    for whose, found in zip(given, parts, strict=True):
        if found.keys() != truths.keys():
            raise AssertionError(f"{whose} has {[*found]}, but {[*truths]} is expected")
    for key, truth in truths.items():
        mine, *theirs = (found[key] for found in parts)
        yield from _each(f"{key!r} of {name}", mine, truth, *(theirs or [None]))


def _named(tensors) -> dict:
    tensors = () if tensors is None else tensors
    return dict(tensors if isinstance(tensors, Mapping) else enumerate(tensors))


def _differences(actual: Tensor, expected: Tensor) -> Tensor:
    if actual.shape != expected.shape:
        refuse("actual", actual, f"{[*expected.shape]}, the shape of expected, is expected")
    for name, x in (("actual", actual), ("expected", expected)):
        if x.is_complex():  # of which float64 keeps the real part
            refuse(name, x.dtype, "real numbers are expected", TypeError)
    actual, expected = actual.detach().double(), expected.detach().double()
    same = (actual == expected) | (actual.isnan() & expected.isnan())
    error = (actual - expected).abs()
    return error.masked_fill(error.isnan(), torch.inf).masked_fill(same, 0)
