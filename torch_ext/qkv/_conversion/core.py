"""What functions of scores and weights come to as attention: a rule for each, by torch's names."""

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qkv._functional import attention

# A score that leaves nothing of a weight, where another key is seen.
_HIDES = -1e4
_SUMS = {"add", "radd", "sub"}


class Core(NamedTuple):
    """softmax(scale * query @ key.mT + terms), dropped; or, by its stage, what comes before."""

    query: Tensor  # [*lead, L, D]
    key: Tensor  # [*lead, S, D]
    lead: torch.Size  # what the leading dimensions of all in here broadcast to
    terms: tuple[Tensor, ...] = ()
    scale: float = 1.0
    hidden: tuple[Tensor, ...] = ()  # the masks that scores were filled by
    fill: float = math.nan  # what the filled scores are by now; NaN where they differ
    blind: Tensor | None = None  # [..., L, 1]: queries whose scores are all the same number
    stage: str = "scores"  # or "row", one number for each query; or "weights"
    dropout: float = 0.0
    zeroed: Tensor | None = None  # where scores were multiplied by 0, until these are hidden

    def has_gradient(self) -> bool:
        return any(x.requires_grad for x in (self.query, self.key, *self.terms))

    def without_gradient(self) -> "Core":
        query, key, *terms = (x.detach() for x in (self.query, self.key, *self.terms))
        return self._replace(query=query, key=key, terms=tuple(terms))


def begin(name: str, *args: Any, **kwargs: Any) -> Core | None:
    """The scores that a product of two tensors may be."""
    term = None
    if name == "baddbmm" and kwargs.keys().isdisjoint({"input", "out"}):
        term, query, key = (*args, *(kwargs[x] for x in ("batch1", "batch2") if x in kwargs))
    elif name == "einsum":
        operands = args[1] if isinstance(args[1], (tuple, list)) else args[1:]
        orders = as_product(args[0])
        if orders is None or orders[2] != sorted(orders[2]) or {*map(type, operands)} != {Tensor}:
            return None
        query, key = (x.permute(order) for x, order in zip(operands, orders[:2], strict=True))
    elif len(args) == 2 and not kwargs:
        query, key = args
    else:
        return None
    if not (type(query) is type(key) is Tensor and query.dtype == key.dtype):
        return None
    if query.dim() != key.dim() or query.dim() < 3 or query.shape[-1] != key.shape[-2]:
        return None
    pairs = [*zip(query.shape[:-2], key.shape[:-2], strict=True)]
    if any(1 not in pair and pair[0] != pair[1] for pair in pairs):
        return None
    lead = torch.Size(b if a == 1 else a for a, b in pairs)
    core = Core(query, key.mT, lead, scale=kwargs.get("alpha", 1.0))
    beta = kwargs.get("beta", 1)
    if term is None or not beta or not (term.requires_grad or term.any()):
        return core
    return _plus(core, (*lead, query.shape[-2], key.shape[-1]), term, alpha=beta)


def change(name: str, core: Core, shape: torch.Size, *args: Any, **kwargs: Any) -> Core | None:
    """After the function of this name, whose first argument is of this shape; None if it is none
    that attention has."""
    rule = _RULES.get(name) if core.zeroed is None or name in _SUMS else None
    own = shape[-2:] == (core.query.shape[-2], core.key.shape[-2]) or core.stage == "row"
    try:
        return rule(core, shape, *args, **kwargs) if rule and (own or name in _SUMS) else None
    except (TypeError, ZeroDivisionError):  # arguments that the rule does not know
        return None


def attend(core: Core, shape: torch.Size, value: Tensor) -> Tensor | None:
    """The weights, of this shape to those outside, times the values."""
    if core.stage != "weights" or value.dim() != len(shape) or value.shape[-2] != shape[-1]:
        return None
    if shape[-2:] != (core.query.shape[-2], core.key.shape[-2]):
        return None
    if any(x not in (1, y) for x, y in zip(value.shape[:-2], shape[:-2], strict=True)):
        return None
    query, key, arranged = core.query, core.key, _arranged(value, shape[:-2], core.lead)
    is_autocast = torch.is_autocast_enabled("cpu")
    if not is_autocast:
        dtype = torch.promote_types(core.query.dtype, value.dtype)
        query, key, arranged = (x.to(dtype) for x in (query, key, arranged))
    bias, mask = _two(core.terms)
    output = attention(query, key, arranged, mask, core.dropout, bias=bias, scale=core.scale)
    dtype = output.dtype if is_autocast else value.dtype
    if core.blind is not None:  # which attention gives 0
        output = output + core.blind * arranged.mean(-2, keepdim=True)
    return output.reshape(*shape[:-1], value.shape[-1]).to(dtype).contiguous()


def _two(terms: tuple[Tensor, ...]) -> list[Tensor | None]:
    """The same sum of no more than two, made where it is smallest."""
    left = list(terms)
    while len(left) > 2:
        pairs = itertools.combinations(left, 2)
        a, b = min(pairs, key=lambda p: torch.broadcast_shapes(p[0].shape, p[1].shape).numel())
        left = [x for x in left if x is not a and x is not b] + [a + b]
    return [*left, None, None][:2]


def _arranged(x: Tensor, old: torch.Size, new: torch.Size) -> Tensor:
    """x, whose leading dimensions broadcast to old, with those that broadcast to new, which are as
    many numbers. A dimension of 1 stays one where it can."""
    if x.dim() < 2:
        x = x.reshape(1, -1)
    lead = (1,) * (len(old) + 2 - x.dim()) + x.shape[:-2]
    same = 0
    while same < min(len(old), len(new)) and old[-1 - same] == new[-1 - same]:
        same += 1
    split = len(old) - same
    rest = (*lead[split:], *x.shape[-2:])
    if all(n == 1 for n in lead[:split]):
        return x.reshape((1,) * (len(new) - same) + rest)
    return x.reshape(*lead[:split], *rest).expand(*old[:split], *rest).reshape(
        *new[: len(new) - same], *rest
    )  # fmt: skip


def _with(core: Core, shape: torch.Size, x: Tensor) -> tuple[Core, Tensor]:
    """The core and something of its shape, as others see it, with the same leading dimensions:
    those that are more, since what is the same for some of them may stay so."""
    old, new = core.lead, shape[:-2]
    if len(new) <= len(old):
        return core, _arranged(x, new, old)
    query, key, *terms = (_arranged(t, old, new) for t in (core.query, core.key, *core.terms))
    places = {x: getattr(core, x) for x in ("blind", "zeroed")}
    places = {x: y if y is None else _arranged(y, old, new) for x, y in places.items()}
    core = core._replace(query=query, key=key, terms=tuple(terms), lead=new, **places)
    return core, _arranged(x, new, new)


def _is_shaped(x: Tensor, shape: torch.Size) -> bool:
    """Whether it broadcasts to the shape."""
    pairs = zip(reversed(x.shape), reversed(shape), strict=False)
    return x.dim() <= len(shape) and all(n in (1, m) for n, m in pairs)


def _plus(core: Core, shape: Any, other: Any, *, alpha: float = 1) -> Core | None:
    if core.stage != "scores":
        return None
    if core.fill != -torch.inf:  # which stays what it is
        core = core._replace(fill=math.nan)
    if isinstance(other, (Core, int, float)):  # what is the same for all keys
        return core
    if not isinstance(other, Tensor) or not _is_shaped(other, shape):
        return None
    if not other.is_floating_point() or core.blind is not None:
        return None
    own = core.query.shape[-2], core.key.shape[-2]
    if shape[-2:] != own:  # queries and keys as the places in a picture
        other, shape = other.expand(shape).reshape(*core.lead, *own), torch.Size((*core.lead, *own))
    core, term = _with(core, shape, other if alpha == 1 else other * alpha)
    if core.zeroed is not None:
        seen = (term > _HIDES).logical_and(core.zeroed)
        if bool(seen.any() or core.zeroed.all(-1).any()):  # of a row of zeros the weights are equal
            return None
        core, term = core._replace(zeroed=None), term.masked_fill(core.zeroed, -torch.inf)
    if term.dtype not in (torch.float32, core.query.dtype):
        term = term.to(torch.promote_types(core.query.dtype, torch.float32))
    return core._replace(terms=(*core.terms, term))


def _times(core: Core, shape: Any, other: Any) -> Core | None:
    if core.stage != "scores":
        return None
    if isinstance(other, Tensor) and other.dim() == 0 and not other.requires_grad:
        other = other.item()
    if isinstance(other, (int, float)):
        if not 0 < other < torch.inf:
            return None
        terms = tuple(x * other for x in core.terms)
        scale, fill = core.scale * float(other), core.fill * other
        return core._replace(scale=scale, fill=fill, terms=terms)
    if not isinstance(other, Tensor) or not _is_shaped(other, shape):
        return None
    if other.dim() and other.shape[-1] != 1:
        zeroed = other == 0
        if other.requires_grad or not bool((zeroed | (other == 1)).all()):  # no mask
            return None
        core, zeroed = _with(core, shape, zeroed)
        return core._replace(zeroed=zeroed)
    core, factor = _with(core, shape, other)
    if core.terms and bool((factor <= 0).any()):  # it would show what a term hides
        return None
    query = (core.query * factor).to(core.query.dtype)
    terms = tuple(_scaled(x, factor) for x in core.terms)
    return core._replace(query=query, fill=math.nan, terms=terms)


def _scaled(term: Tensor, factor: Tensor) -> Tensor:
    """What is hidden, -inf, stays so and gives the factor no gradient, as finite fills give none:
    the product's own would be -inf * 0."""
    hidden = term == -torch.inf
    return (term.masked_fill(hidden, 0.0) * factor).masked_fill(hidden, -torch.inf)


def _fill(core: Core, shape: Any, mask: Tensor, value: Any) -> Core | None:
    if mask.dtype != torch.bool:
        return None
    if isinstance(value, Tensor) and (value.numel() != 1 or value.requires_grad):
        return None
    if core.stage == "weights" and value == 0:
        known = any(x is mask or (x.shape == mask.shape and x.equal(mask)) for x in core.hidden)
        # Of a row that masks hide only together, one of them leaves some weights.
        known = known and (core.blind is None or len(core.hidden) == 1)
        return core._replace(blind=None) if known else None
    value = float(value)
    if core.stage != "scores" or value > _HIDES:
        return None
    term = torch.zeros(mask.shape, dtype=core.query.dtype).masked_fill(mask, -torch.inf)
    found = _plus(core._replace(blind=None), shape, term)
    if found is None:
        return None
    hidden, is_one = (*core.hidden, mask), not core.hidden or value == core.fill
    found = found._replace(hidden=hidden, fill=value if is_one else math.nan)
    if is_one and value == -torch.inf:
        return found
    blind = functools.reduce(torch.logical_or, hidden).all(-1, keepdim=True)
    if not blind.any():
        return found
    # Where the numbers differ, the softmax would see the keys of the greatest alone.
    return found._replace(blind=_with(found, shape, blind)[1]) if is_one else None


def _of_rows(core: Core, shape: Any, dim: Any, *_: Any, stage: str, **options: Any) -> Core | None:
    is_last = dim in (-1, len(shape) - 1) and core.stage == "scores"
    return core._replace(stage=stage) if is_last else None


def _dropout(
    core: Core, shape: Any, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Core | None:
    p = p if training else 0.0
    if core.stage != "weights" or inplace or (p and core.dropout):
        return None
    return core._replace(dropout=p or core.dropout)


def _at_least(core: Core, shape: Any, low: Any) -> Core | None:
    """Finite where it was -inf, so that a row of nothing else has equal weights."""
    is_low = isinstance(low, Tensor) and low.dim() == 0 and bool(low <= _HIDES)
    if not is_low or core.stage != "scores":
        return None
    parts = [torch.tensor(False), *(x == -torch.inf for x in core.terms)]
    hidden = functools.reduce(torch.logical_or, parts)
    return None if hidden.all(-1).any() else core._replace(fill=max(core.fill, low.item()))


_RULES: dict[str, Callable[..., Core | None]] = {
    "add": _plus, "radd": _plus, "sub": functools.partial(_plus, alpha=-1), "mul": _times,
    "rmul": _times, **dict.fromkeys(("div", "truediv"), lambda c, s, x: _times(c, s, 1 / x)),
    "masked_fill": _fill, "softmax": functools.partial(_of_rows, stage="weights"),
    "dropout": _dropout, "amax": functools.partial(_of_rows, stage="row"), "max": _at_least,
    "maximum": _at_least,
}  # fmt: skip


@functools.cache
def as_product(equation: str) -> tuple[list[int], list[int], list[int]] | None:
    """How einsum's operands are permuted to be those of matmul, and how what that gives is; None
    if it does something else."""
    inputs, _, out = equation.replace(" ", "").partition("->")
    left, _, right = inputs.partition(",")
    if not all(x.isalpha() and len({*x}) == len(x) for x in (left, right, out)):
        return None
    batch = [x for x in out if x in left and x in right]
    rows, columns = [x for x in out if x not in right], [x for x in out if x not in left]
    summed = [x for x in left if x in right and x not in out]
    is_one = len(rows) == len(columns) == len(summed) == 1
    if not is_one or {*left} != {*batch, *rows, *summed} or {*right} != {*batch, *columns, *summed}:
        return None
    orders = (left, batch + rows + summed), (right, batch + summed + columns)
    left_order, right_order = ([x.index(c) for c in order] for x, order in orders)
    return left_order, right_order, [(batch + rows + columns).index(c) for c in out]
