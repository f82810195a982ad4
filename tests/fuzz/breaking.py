"""Ways to make a good call a bad one, or an odd one that is still good.

Nobody says here which of the two it is: a call that is refused must be refused in words that name
an argument, and one that is not must give what the reference gives.
"""

import warnings

import torch
from hypothesis import strategies as st

NAN, INF = float("nan"), float("inf")
DTYPES = [
    torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32,
    torch.bool, torch.uint8, torch.complex64, torch.float8_e4m3fn,
]  # fmt: skip
FLOATS = [0.0, -0.0, 1.0, -1.0, 0.3, 1.5, 1e-300, 1e300, NAN, INF, -INF]
INTEGERS = [0, 1, -1, 5, 2**31 - 1, 2**31, 2**62, 2**63 - 1, -(2**63), -2]
WINDOWS = [
    None, (0, 0), (-1, -1), (-2, 0), (0, -(2**63)), (2**63 - 1, 2**63 - 1), (2**62, 0), (3,),
    (1, 2, 3), (), 3, (1.5, 0),
]  # fmt: skip
SHARDS = [
    (0,) * 7, (3, 5, 100, 100, 1, 50, 2), (90, 0, 100, 100, 0, 50, 0), (2**40,) * 7, (2**62,) * 7,
    (0, 0, 2**40, 2**40, 0, 0, 2**40), (-1, 0, 0, 0, 0, 0, 0), (1,), (), 3, (1.5,) * 7,
]  # fmt: skip
JUNK = [None, "query", 1, 2.5, True, [1, 2], torch.float32]


def changed(x, *, copy=True):
    """A leaf with x's values, whatever was done to get them."""
    x = x.detach()
    return x.clone() if copy else x


def resized(draw, x):
    if not x.dim():
        return x[None]
    dim = draw(st.integers(0, x.dim() - 1))
    n = draw(st.sampled_from([0, 1, x.size(dim) + 1, max(0, x.size(dim) - 1), 2 * x.size(dim)]))
    if n <= x.size(dim):
        return x.narrow(dim, 0, n)
    more = x.narrow(dim, 0, 1) if x.size(dim) else x.new_zeros(_with(x.shape, dim, 1))
    return torch.cat([x, more.expand(_with(x.shape, dim, n - x.size(dim)))], dim)


def _with(shape, dim, n):
    return [*shape[:dim], n, *shape[dim + 1 :]]


def other_rank(draw, x):
    ways = [lambda: x[None], lambda: x[None, None], lambda: x[..., None], lambda: x.flatten()]
    if x.dim() and x.numel():
        ways += [lambda: x[0], lambda: x.flatten()[0]]
    if x.dim() > 1:
        ways += [lambda: x.transpose(0, -1), lambda: x.flatten(0, 1)]
    return draw(st.sampled_from(ways))()


def other_dtype(draw, x):
    return x.to(draw(st.sampled_from(DTYPES)))


def expanded(draw, x):
    """x with one slice again and again, or with a size that nobody has the memory for."""
    if not x.dim() or not x.numel():
        return x[None].expand(2, *x.shape)
    dim = draw(st.integers(0, x.dim() - 1))
    n = draw(st.sampled_from([x.size(dim), x.size(dim), 2**47, 2**61]))
    n = min(n, 2**62 * x.size(dim) // x.numel())  # torch counts elements in 64 bits
    return x.narrow(dim, 0, 1).expand(_with(x.shape, dim, n))


def other_strides(draw, x):
    """x with any stride where a dimension has one element, and elements far apart where it has
    more."""
    if 1 in x.shape and draw(st.booleans()):
        far = draw(st.sampled_from([0, 1, 2**40, 2**62]))
        strides = [far if n == 1 else s for n, s in zip(x.shape, x.stride(), strict=True)]
        return x.as_strided(x.shape, strides)
    if x.dim() < 2:
        return torch.stack([x, x], -1)[..., 0]
    order = draw(st.permutations(range(x.dim())))
    back = sorted(range(x.dim()), key=lambda d: order[d])
    return x.permute(order).contiguous().permute(back)


def negated(draw, x):
    """-x by the bit of a tensor that says that it is negated, instead of by other numbers."""
    return torch._neg_view(-x) if x.is_floating_point() else x


def other_kind(draw, x):
    ways = [lambda: x.to("meta"), lambda: x.to("meta"), x.to_sparse]
    for layout in (torch.jagged, torch.strided) if x.dim() else ():
        ways.append(lambda layout=layout: torch.nested.nested_tensor([x, x], layout=layout))
    if x.dtype == torch.float32 and 0 < x.dim() <= 5:  # oneDNN takes up to 5 dimensions
        ways.append(x.to_mkldnn)
        ways.append(lambda: torch.quantize_per_tensor(x, 0.1, 0, torch.quint8))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some of these kinds are deprecated
        return draw(st.sampled_from(ways))()


def other_numbers(draw, x):
    """x with other numbers, as tables and lengths may have them: out of range, falling, far too
    large."""
    if not x.numel() or x.is_floating_point() or x.dtype == torch.bool:
        return x
    x = x.clone(memory_format=torch.contiguous_format)
    n = draw(st.sampled_from([k for k in INTEGERS if torch.iinfo(x.dtype).min <= k]))
    place = draw(st.integers(0, x.numel() - 1))
    x.view(-1)[place] = min(n, torch.iinfo(x.dtype).max)
    return x


def requires_grad(draw, x):
    return x.requires_grad_(x.is_floating_point())


CHANGES = [
    resized, resized, other_rank, other_dtype, expanded, other_strides, negated, other_kind,
    other_numbers, requires_grad,
]  # fmt: skip


def other_tensor(draw, x):
    if draw(st.integers(0, 9)) == 0:
        return draw(st.sampled_from(JUNK))
    change = draw(st.sampled_from(CHANGES[-2:] * 3 if _is_index(x) else CHANGES))
    return change(draw, changed(x, copy=change is not other_strides))


def _is_index(x):
    return x.dtype in (torch.int32, torch.int64) and x.numel()


def other_value(draw, x):
    if isinstance(x, torch.Tensor):
        return other_tensor(draw, x)
    if isinstance(x, bool):
        return draw(st.sampled_from([not x, not x, None, 2, "yes", NAN]))
    if isinstance(x, int):
        return draw(st.sampled_from([*INTEGERS, *JUNK]))
    if isinstance(x, float):
        return draw(st.sampled_from([*FLOATS, *JUNK]))
    if isinstance(x, tuple):
        return draw(st.sampled_from(WINDOWS))
    if isinstance(x, list):
        return draw(st.sampled_from([[], [True] * 3, [*x, True], None, [not y for y in x]]))
    return draw(st.sampled_from(["heads", "queries", "", "keys", *JUNK]))


def where_there_was_none(draw, name, good):
    """A value for an argument that may be None. A tensor is one of the good call's, changed or
    not."""
    if name in ("scale", "softmax_scale"):
        return draw(st.sampled_from(FLOATS))
    if name == "reduce":
        return draw(st.sampled_from(["heads", "queries", "", "keys"]))
    if name == "window_size":
        return draw(st.sampled_from(WINDOWS))
    if name == "shard":
        return draw(st.sampled_from(SHARDS))
    others = [x for x in good.values() if isinstance(x, torch.Tensor)]
    return other_tensor(draw, draw(st.sampled_from(others)))


@st.composite
def broken(draw, calls):
    """Draws (arguments, changes): a call in which nothing, one argument or two have been
    changed."""
    good = draw(calls)
    call, names = dict(good), sorted(good)
    times = min(len(names), draw(st.sampled_from([0, 0, 1, 1, 1, 2])))
    chosen = draw(st.lists(st.sampled_from(names), min_size=times, max_size=times, unique=True))
    for name in chosen:
        if call[name] is None:
            call[name] = where_there_was_none(draw, name, good)
        else:
            call[name] = other_value(draw, call[name])
    return call, chosen
