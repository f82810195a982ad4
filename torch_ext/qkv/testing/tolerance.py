"""How far a result may be from the truth: as far as torch's own, in the same dtype, is."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

# So many units in the last place of the largest element are always allowed: sums of the same
# numbers in another order differ, though neither is better. Half a unit is what rounding a result
# to half precision costs; in float64 the truth itself has been rounded.
ROUNDINGS = {torch.bfloat16: 0.5, torch.float16: 0.5, torch.float32: 8, torch.float64: 64}

Tensors = Tensor | Sequence["Tensors"] | Mapping[str, "Tensors"]


def max_error(actual: Tensor, expected: Tensor) -> float:
    """The largest absolute difference; inf where one is NaN or infinite and the other is not."""
    if expected.numel() == 0:
        return 0.0
    return _differences(actual, expected).max().item()


def rms_error(actual: Tensor, expected: Tensor) -> float:
    """The root mean square of the differences, relative to that of expected."""
    actual, expected = (x.detach().double() for x in (actual, expected))
    return ((actual - expected).norm() / expected.norm()).item()


def rounding(expected: Tensor, dtype: torch.dtype) -> float:
    """What `assert_close` always allows of results in dtype."""
    finite = expected.detach().double().nan_to_num(0, 0, 0)
    largest = finite.abs().max().item() if finite.numel() else 0.0
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
        actual: what is judged: a tensor, or a sequence or mapping of tensors, which are judged one
            by one.
        expected: the truth, of the same shapes: by `qkv.testing.attention` in float64.
        baseline: the same by torch's own operators in actual's dtype: what may be expected of that
            dtype. None: only rounding is allowed.
        times: how many times baseline's error is allowed.
        name: what actual is called in an error.

    Raises:
        AssertionError: an error is larger, shapes or names differ, or one is NaN or infinite where
            the other is not. It says which tensor, where, and by how much.
    """
    if isinstance(expected, Tensor):
        return _assert_tensor_close(actual, expected, baseline, times, name)
    for key, parts in _items(actual, expected, baseline, name):
        assert_close(*parts, times=times, name=key)


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
    if not isinstance(expected, Tensor):
        for key, parts in _items(actual, expected, baseline, name):
            assert_as_accurate(*parts, times=times, name=key)
        return
    _assert_same_shapes(actual, expected, baseline, name)
    error, theirs = rms_error(actual, expected), rms_error(baseline, expected)
    if not error <= times * theirs:
        raise AssertionError(
            f"{name} is off by {error:.3g}, root mean square, relative; at most {times:.3g} times "
            f"the baseline's {theirs:.3g} is allowed"
        )


def _assert_tensor_close(actual, expected, baseline, times, name):
    _assert_same_shapes(actual, expected, baseline, name)
    error, slack = max_error(actual, expected), rounding(expected, actual.dtype)
    theirs = 0.0 if baseline is None else max_error(baseline, expected)
    if error <= times * theirs + slack:
        return
    where = _differences(actual, expected).flatten().argmax()
    place = [int(n) for n in torch.unravel_index(where, expected.shape)]
    found, truth = (x.detach().flatten()[where].item() for x in (actual, expected))
    raise AssertionError(
        f"{name} is off by {error:.3g} at {place}, where it is {found:.6g} and {truth:.6g} is "
        f"expected; at most {times * theirs + slack:.3g} is allowed: {times:.3g} times the "
        f"baseline's {theirs:.3g}, and {slack:.3g} for rounding"
    )


def _assert_same_shapes(actual, expected, baseline, name):
    for whose, x in ((name, actual), (f"the baseline of {name}", baseline)):
        if isinstance(x, Tensor) and x.shape != expected.shape:
            raise AssertionError(
                f"{whose} has the shape {[*x.shape]}, but {[*expected.shape]} is expected"
            )
    if not isinstance(actual, Tensor):
        raise AssertionError(f"{name} is {actual!r}, but a tensor is expected")


def _differences(actual: Tensor, expected: Tensor) -> Tensor:
    actual, expected = (x.detach().double() for x in (actual, expected))
    same = (actual == expected) | (actual.isnan() & expected.isnan())
    error = (actual - expected).abs()
    return error.masked_fill(error.isnan(), torch.inf).masked_fill(same, 0)


def _items(actual, expected, baseline, name):
    """(name, (actual, expected, baseline)) of each part."""
    trees = [dict(x) if isinstance(x, Mapping) else dict(enumerate(x)) for x in (actual, expected)]
    if baseline is None:
        trees.append(dict.fromkeys(trees[1]))
    else:
        trees.append(dict(baseline) if isinstance(baseline, Mapping) else dict(enumerate(baseline)))
    for whose, tree in ((name, trees[0]), (f"the baseline of {name}", trees[2])):
        if tree.keys() != trees[1].keys():
            raise AssertionError(f"{whose} has {[*tree]}, but {[*trees[1]]} is expected")
    for key in trees[1]:
        label = key if name == "the result" and isinstance(key, str) else f"{name}[{key!r}]"
        yield label, tuple(tree[key] for tree in trees)
