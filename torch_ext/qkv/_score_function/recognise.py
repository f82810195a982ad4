"""Programs that do what options of `attention` do: see `Known`."""

import math
from collections.abc import Container
from typing import Any, NamedTuple

from torch import Tensor

from qkv._score_function.instructions import Line

_ORDER = ("batch", "head", "query", "key")
_NEGATED = {"ge": "lt", "lt": "ge", "gt": "le", "le": "gt"}

Range = tuple[float, float]  # (n, m): n <= query - key <= m, integers or infinite
Affine = tuple[int, int, int]  # of query, of key, and a number
Part = tuple[int, tuple[int, ...]]  # of the joined tables: where it begins, and its sizes


class Known(NamedTuple):
    """A program as what is done last, first: pairs hidden by the distance of query and key, then a
    bias, slopes and a soft cap, if there is nothing but these within.

    inner: the program of a score that no distance hides; "" where it is the score itself.
    bias: its table, and the numbers of the dimensions [B, H, L, S] that it has.
    """

    inner: str
    first: int | None = None  # the least query - key that is not hidden
    last: int | None = None
    softcap: float = 0.0
    slopes: Part | None = None
    bias: Part | None = None
    bias_dims: tuple[int, ...] = ()
    is_whole: bool = False  # whether inner is nothing but softcap, slopes and bias


def written(tables: list[Line], lines: list[Line]) -> str:
    return "\n".join(" ".join(map(str, line)) for line in (*tables, *lines))


def operands(line: Line) -> tuple[int, ...]:
    """The registers that an instruction reads."""
    return tuple(x for x in line[2 if line[0] == "load" else 1 :] if isinstance(x, int))


def known(tables: list[Line], lines: list[Line]) -> Known:
    """What there is in a program, whatever the sizes of the call."""
    of = _Reader(tables, lines)
    root, ends = of.shown(len(lines) - 1)
    inner = "" if lines[root] == ("score",) else written(tables, lines[: root + 1])
    first, last = (None if math.isinf(x) else int(x) for x in ends)
    return of.summed(root, Known(inner, first, last))


def options_of(
    text: str, of: Known, tables: Tensor | None, sizes: tuple[int, int, int, int],
    taken: Container[str],
) -> tuple[str, dict[str, Any]]:  # fmt: skip
    """What is left of the program for a call of these sizes, and the options that stand for the
    rest.

    tables: the floating ones. sizes: B, H, L and S. taken: the options that the caller gives.
    """
    _, H, L, S = sizes
    options: dict[str, Any] = {}
    if of.first == 0:
        options["is_causal"] = True
    left = -1 if of.last is None else of.last + S - L
    right = -1 if of.first is None or of.first == 0 else -of.first - (S - L)
    if (of.last is not None and left < 0) or (of.first and right < 0):
        return text, {}
    if left >= 0 or right >= 0:
        options["window_size"] = (left, right)
        if "window_size" in taken:
            return text, {}
    within = {"softcap": of.softcap, "alibi_slopes": of.slopes, "bias": of.bias}
    within = {name: x for name, x in within.items() if x}
    is_fit = of.slopes is None or (L == S and of.slopes[1] == (H,))
    is_fit = is_fit and (of.bias is None or of.bias[1] == tuple(sizes[d] for d in of.bias_dims))
    if not (of.is_whole and is_fit) or any(name in taken for name in within):
        return of.inner, options
    bias_shape = tuple(n if d in of.bias_dims else 1 for d, n in enumerate(sizes))
    for name, shape in {"alibi_slopes": (H,), "bias": bias_shape}.items():
        if name in within:
            within[name] = _part(tables, within[name][0], shape)
    return "", options | within


def _part(tables: Tensor | None, offset: int, sizes: tuple[int, ...]) -> Tensor:
    """One of the joined tables, which begins there."""
    assert tables is not None
    n = math.prod(sizes)
    return (tables if n == tables.numel() else tables[offset : offset + n]).view(sizes)


class _Reader:
    def __init__(self, tables: list[Any], lines: list[Any]) -> None:
        self.tables, self.lines = tables, lines

    def shown(self, n: int) -> tuple[int, Range]:
        """The score that is hidden by distance, and where it is not."""
        first, last = -math.inf, math.inf
        while self.lines[n][0] == "where":
            condition, *scores = operands(self.lines[n])
            is_hidden = [self.lines[x] == ("float", "-inf") for x in scores]
            found = self.range(condition, is_hidden[0])
            if found is None or is_hidden[0] == is_hidden[1]:
                break
            first, last = max(first, found[0]), min(last, found[1])
            n = scores[is_hidden[0]]
        return n, (first, last)

    def range(self, n: int, is_negated: bool) -> Range | None:
        """Where a condition holds."""
        name, *inputs = self.lines[n]
        if name == "not":
            return self.range(inputs[0], not is_negated)
        if name == ("or" if is_negated else "and"):
            return _all_of(*(self.range(x, is_negated) for x in inputs))
        if name not in _NEGATED:
            return None
        name = _NEGATED[name] if is_negated else name
        a, b = inputs if name in ("le", "lt") else reversed(inputs)
        is_distance = self.lines[a][0] == "abs"  # which is x and -x, each of them at most b
        x, most = self.affine(self.lines[a][1] if is_distance else a), self.affine(b)
        least = int(name in ("lt", "gt"))
        signs = (1, -1) if is_distance else (1,)
        return _all_of(*(_at_least(_plus(most, x, -sign), least) for sign in signs))

    def affine(self, n: Any) -> Affine | None:
        """An integer as a sum of query, key and a number."""
        name, *inputs = self.lines[n]
        if name in ("query", "key"):
            return (1, 0, 0) if name == "query" else (0, 1, 0)
        if name == "int":
            return (0, 0, int(inputs[0]))
        if name == "neg":
            return _plus((0, 0, 0), self.affine(inputs[0]), -1)
        if name in ("add", "sub"):
            return _plus(self.affine(inputs[0]), self.affine(inputs[1]), 1 if name == "add" else -1)
        return None

    def summed(self, n: int, of: Known) -> Known:
        """With the softcap, slopes and bias of a sum, if it is one of these and a score alone."""
        while (name := self.lines[n][0]) in ("add", "sub"):
            a, b = operands(self.lines[n])
            found = self.term(b, of, 1 if name == "add" else -1)
            if found is None and name == "add":
                (a, b), found = (b, a), self.term(a, of, 1)
            if found is None:
                return of
            n, of = a, found
        cap = self.softcap(n)
        return of if cap is None else of._replace(softcap=cap, is_whole=True)

    def softcap(self, n: int) -> float | None:
        """0 of the score itself, None of what is neither."""
        if self.lines[n] == ("score",):
            return 0.0
        for cap, of in self.pairs(n, "mul"):
            inner = operands(self.lines[of])
            if self.lines[of][0] != "tanh" or self.lines[inner[0]][0] != "div":
                continue
            score, divisor = operands(self.lines[inner[0]])
            # Beyond these it is no softcap, and the function computes what torch's would.
            is_number = self.lines[cap][0] == "float" and 1e-38 < float(self.lines[cap][1]) < 1e38
            if is_number and divisor == cap and self.lines[score] == ("score",):
                return float(self.lines[cap][1])
        return None

    def term(self, n: int, of: Known, sign: int) -> Known | None:
        """of, with one more summand in it; None if it is another, or a second one."""
        if sign == 1 and of.bias is None and self.lines[n][0] == "load":
            names = tuple(self.lines[x][0] for x in operands(self.lines[n]))
            dims = tuple(_ORDER.index(x) for x in names if x in _ORDER)
            is_sorted = list(dims) == sorted(set(dims))
            if is_sorted and len(dims) == len(names) and dims[-2:] == (2, 3):
                return of._replace(bias=self.part(n), bias_dims=dims)
        if self.lines[n][0] == "neg":
            n, sign = operands(self.lines[n])[0], -sign
        for slopes, distance in self.pairs(n, "mul"):
            line = self.lines[slopes]
            is_of_head = line[0] == "load" and [self.lines[x] for x in line[2:]] == [("head",)]
            if is_of_head and of.slopes is None and sign == self.nearness(distance, of):
                return of._replace(slopes=self.part(slopes))
        return None

    def nearness(self, n: int, of: Known) -> int:
        """-1 of the distance of query and key, 1 of its negative, 0 of something else."""
        sign = -1
        while (name := self.lines[n][0]) in ("neg", "to_float"):
            n, sign = operands(self.lines[n])[0], -sign if name == "neg" else sign
        is_absolute = name == "abs"
        found = self.affine(operands(self.lines[n])[0] if is_absolute else n)
        if found not in ((1, -1, 0), (-1, 1, 0)):
            return 0
        if is_absolute:
            return sign
        return sign * found[0] if of.first is not None and of.first >= 0 else 0

    def pairs(self, n: int, name: str) -> list[tuple[int, int]]:
        if self.lines[n][0] != name:
            return []
        a, b = operands(self.lines[n])
        return [(a, b), (b, a)]

    def part(self, n: int) -> Part:
        name, offset, *sizes = self.tables[self.lines[n][1]]
        assert name == "@float"
        return offset, tuple(sizes)


def _plus(x: Affine | None, y: Affine | None, sign: int) -> Affine | None:
    if x is None or y is None:
        return None
    return x[0] + sign * y[0], x[1] + sign * y[1], x[2] + sign * y[2]


def _at_least(x: Affine | None, least: int) -> Range | None:
    """Where x is, if it is a number and the distance of query and key."""
    if x is None or x[:2] not in ((1, -1), (-1, 1)):
        return None
    return (least - x[2], math.inf) if x[0] == 1 else (-math.inf, x[2] - least)


def _all_of(*ranges: Range | None) -> Range | None:
    known = [x for x in ranges if x is not None]
    if len(known) < len(ranges):
        return None
    return max(x[0] for x in known), min(x[1] for x in known)
