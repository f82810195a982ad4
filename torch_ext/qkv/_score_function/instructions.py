"""Operations of torch as instructions of a score program: `RULES`, by the name of the operation."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
from torch.utils._python_dispatch import _disable_current_modes

Line = tuple[str | int, ...]  # of a program's text, such as ("load", 0, 2)
KINDS = "bif"  # booleans, integers, floating numbers: torch's result has the last one of its inputs
_RESULT = dict.fromkeys("eq ne lt le gt ge".split(), "b") | {"to_float": "f", "to_int": "i"}
_TYPES = {"b": bool, "i": int, "f": float}  # whose names the text of a program has


class Register(NamedTuple):
    number: int
    kind: str
    value: Any = None  # of a constant
    has_gradient: bool = False  # follows from the score or from a floating table


class NoRule(Exception):
    """The operation has no instructions for these arguments; says what is expected."""


class Instructions:
    """Instructions in their order. The same one twice is one."""

    def __init__(self) -> None:
        self.lines: dict[Line, Register] = {}

    def line(self, line: Line, kind: str, **state: Any) -> Register:
        return self.lines.setdefault(line, Register(len(self.lines), kind, **state))

    def __call__(self, name: str, *inputs: Any) -> Register:
        """Of registers, and of numbers, which are of the kind of the last register."""
        last = next(x for x in reversed(inputs) if isinstance(x, Register))
        registers = [x if isinstance(x, Register) else self.of(x, last.kind) for x in inputs]
        kind = _RESULT.get(name, last.kind)
        has_gradient = kind == "f" and any(x.has_gradient for x in registers)
        return self.line((name, *(x.number for x in registers)), kind, has_gradient=has_gradient)

    def constant(self, value: Any, kind: str) -> Register:
        value = _TYPES[kind](value)
        if kind == "i" and not -(2**31) <= value < 2**31:
            raise NoRule(f"{value} is no int32, in which integers are computed")
        text = repr(int(value) if kind == "b" else value)
        return self.line((_TYPES[kind].__name__, text), kind, value=value)

    def of(self, x: Any, kind: str) -> Register:
        """A register or a number, converted."""
        if not isinstance(x, Register):
            return self.constant(x, kind)
        if x.kind == kind:
            return x
        if x.value is not None:
            return self.constant(x.value, kind)
        if kind == "b":
            return self("ne", x, 0)
        return self(f"to_{_TYPES[kind].__name__}", x)


Rule = Callable[..., Register]  # of instructions, the kind of the result, and torch's arguments


def _each(name: str, of_bools: str = "") -> Rule:
    """One instruction, with all inputs of the kind of its result."""

    def rule(p: Instructions, kind: str, *inputs: Any) -> Register:
        if kind == "b" and not of_bools:
            raise NoRule("it is not expected of booleans")
        return p(of_bools if kind == "b" else name, *(p.of(x, kind) for x in inputs))

    return rule


def _compared(name: str) -> Rule:
    def rule(p: Instructions, _: str, a: Any, b: Any) -> Register:
        kind = max(_kind(a), _kind(b), key=KINDS.index)
        if kind == "b" and name not in ("eq", "ne"):  # programs have no order of booleans
            kind = "i"
        return p(name, p.of(a, kind), p.of(b, kind))

    return rule


def _kind(x: Any) -> str:
    return x.kind if isinstance(x, Register) else {bool: "b", int: "i"}.get(type(x), "f")


def _value(x: Any) -> Any:
    return x.value if isinstance(x, Register) else x


def _add(p: Instructions, kind: str, a: Any, b: Any, alpha: Any = 1, sign: str = "add") -> Register:
    b = p.of(b, kind) if alpha == 1 else p("mul", p.of(b, kind), alpha)
    return _each(sign, "or" if sign == "add" else "")(p, kind, a, b)


def _div(p: Instructions, kind: str, a: Any, b: Any, rounding_mode: str | None = None) -> Register:
    a, b = p.of(a, kind), p.of(b, kind)
    if rounding_mode is None:
        return p("div", a, b)
    if rounding_mode == "floor":
        return p("floordiv", a, b)
    if kind == "f":
        return _trunc(p, kind, p("div", a, b))
    down = p("floordiv", a, b)
    return p("where", _is_cut(p, a, b), p("add", down, 1), down)


def _is_cut(p: Instructions, a: Register, b: Register) -> Register:
    """Whether a / b, rounded towards zero, is more than a / b rounded down."""
    return p("and", p("ne", p("rem", a, b), 0), p("xor", p("lt", a, 0), p("lt", b, 0)))


def _fmod(p: Instructions, kind: str, a: Any, b: Any) -> Register:
    a, b = p.of(a, kind), p.of(b, kind)
    rest = p("rem", a, b)
    # Of floating numbers rest - b has lost the digits of an a that is small beside b.
    cut = p("sub", rest, b) if kind == "i" else p("neg", p("rem", p("neg", a), b))
    return p("where", _is_cut(p, a, b), cut, rest)


def _rounded(of: Callable[[Instructions, Register], Register]) -> Rule:
    """Rounding, which leaves integers as they are."""
    return lambda p, kind, x: x if kind != "f" else of(p, p.of(x, "f"))


def _ceil(p: Instructions, x: Register) -> Register:
    return p("neg", p("floor", p("neg", x)))


def _round(p: Instructions, x: Register) -> Register:
    """To the nearest integer, of two to the even one."""
    down = p("floor", x)
    up, rest = p("add", down, 1), p("sub", x, down)
    even = p("mul", p("floor", p("mul", up, 0.5)), 2)
    return p("where", p("gt", rest, 0.5), up, p("where", p("lt", rest, 0.5), down, even))


_trunc = _rounded(lambda p, x: p("where", p("lt", x, 0), _ceil(p, x), p("floor", x)))


def _sign(p: Instructions, kind: str, x: Any) -> Register:
    x = p.of(x, kind)
    if kind == "b":
        return x
    return p("sub", p.of(p("gt", x, 0), kind), p.of(p("lt", x, 0), kind))


def _clamp(
    p: Instructions, kind: str, x: Any, min: Any = None, max: Any = None, closed: str = "t"
) -> Register:
    """Of floating numbers by `where`: at the ends there is x's gradient, and with `closed="e"`, as
    relu and its kin are defined, none."""
    x = p.of(x, kind)
    for end, beyond, inner in ((min, "l", "maximum"), (max, "g", "minimum")):
        if end is not None and kind == "f":
            end = p.of(end, kind)
            x = p("where", p(beyond + closed, x, end), end, x)
        elif end is not None:
            x = RULES[inner](p, kind, x, end)
    return x


def _gradient_at_end() -> bool:
    """Whether torch.clamp has one: that of 2.13 does, and that of 2.15 does not.

    Under the modes that this module may be imported in, tensors need not have numbers. The node is
    called by itself: the engine would start threads for GPUs, after which no process may fork."""
    with _disable_current_modes(), torch.inference_mode(False), torch.enable_grad():
        of_clamp = torch.zeros((), device="cpu", requires_grad=True).clamp(min=0).grad_fn
        return bool(cast("Any", of_clamp)(torch.ones((), device="cpu")))


_CLOSED = "t" if _gradient_at_end() else "e"


def _where(p: Instructions, kind: str, condition: Any, a: Any, b: Any) -> Register:
    return p("where", p.of(condition, "b"), p.of(a, kind), p.of(b, kind))


def _pow(p: Instructions, kind: str, x: Any, exponent: Any) -> Register:
    n, base = _value(exponent), _value(x)
    if n is None and base is not None and base > 0 and kind == "f":
        return p("exp", p("mul", p.of(exponent, "f"), math.log(base)))
    if n is None or (kind == "i" and n < 0):
        raise NoRule("an exponent that is a number is expected, or a base that is a positive one")
    x = p.of(x, kind)
    if abs(n) == 0.5:
        return p("sqrt" if n > 0 else "rsqrt", x)
    if n != int(n):
        return _real_power(p, x, n)
    x = x if n >= 0 else p("div", 1, x)
    result, square, left = None, x, abs(int(n))
    while left:
        if left % 2:
            result = square if result is None else p("mul", result, square)
        left //= 2
        square = p("mul", square, square) if left else square
    return p.of(1, kind) if result is None else result


def _real_power(p: Instructions, x: Register, n: float) -> Register:
    """exp(n log x), but of 0 and of infinities, which x + x = x tells, without the logarithm: that
    of -inf is NaN, and its derivative at 0 infinite, where that of a power above 1 is 0."""
    size, is_end = p("abs", x), p("eq", p("add", x, x), x)
    end = size if n > 1 else p("sqrt", size) if n > 0 else p("div", 1, size)
    inner = p("log", p("where", is_end, 1, x))
    return p("where", is_end, end, p("exp", p("mul", inner, n)))


def _converted(p: Instructions, kind: str, x: Any, *_: Any, **__: Any) -> Register:
    return p.of(x, kind)


def _logical(name: str) -> Rule:
    return lambda p, _, *inputs: p(name, *(p.of(x, "b") for x in inputs))


def _real(of: Callable[..., Register]) -> Rule:
    """Computes with a floating number."""
    return lambda p, _, x, *args, **kwargs: of(p, p.of(x, "f"), *args, **kwargs)


def _near_zero(p: Instructions, x: Register) -> tuple[Register, Register]:
    """Whether x is, and x there, elsewhere 0: what is computed of it and not chosen is finite, and
    so are its derivatives."""
    is_near = p("lt", p("abs", x), 0.5)
    return is_near, p("where", is_near, x, 0)


def _expm1(p: Instructions, x: Register) -> Register:
    """Near 0 tanh(x / 2) (exp(x) + 1), which cancels nothing."""
    is_near, near = _near_zero(p, x)
    inner = p("mul", p("tanh", p("mul", near, 0.5)), p("add", p("exp", near), 1))
    return p("where", is_near, inner, p("sub", p("exp", x), 1))


def _log1p(p: Instructions, x: Register) -> Register:
    """log(u) of u = 1 + x, and near 0 what u was rounded by, over u."""
    near = _near_zero(p, x)[1]
    u = p("add", near, 1)
    rounded = p("div", p("sub", near, p("sub", u, 1)), u)
    return p("add", p("log", p("add", x, 1)), rounded)


def _sinc(p: Instructions, x: Register) -> Register:
    """Nothing is divided by 0: what is not chosen stays finite, and so does its derivative."""
    is_zero = p("eq", x, 0)
    inner = p("mul", p("where", is_zero, 1, x), math.pi)
    return p("where", is_zero, 1, p("div", p("sin", inner), inner))


def _xlog(p: Instructions, x: Any, y: Any, log: Callable[..., Register], least: int) -> Register:
    """x log(y), where y is more than `least`, with its derivatives at x = 0, too; else 0 for an x
    of 0, without the logarithm, which has no finite derivative there."""
    x, y = p.of(x, "f"), p.of(y, "f")
    has_none = p("or", p("le", y, least), p("eq", y, math.inf))
    is_zero = p("and", p("eq", x, 0), has_none)
    return p("where", is_zero, 0, p("mul", x, log(p, p("where", is_zero, 1, y))))


def _softplus(p: Instructions, x: Register, beta: float = 1, threshold: float = 20) -> Register:
    """Beyond the threshold x; what is not chosen there stays finite, and so does its derivative."""
    scaled = x if beta == 1 else p("mul", x, beta)
    inner = _log1p(p, p("exp", _clamp(p, "f", scaled, None, threshold)))
    inner = inner if beta == 1 else p("div", inner, beta)
    return p("where", p("gt", scaled, threshold), x, inner)


def _elu(
    p: Instructions, x: Register, alpha: float = 1, scale: float = 1, input_scale: float = 1
) -> Register:
    inner = _clamp(p, "f", p("mul", x, input_scale), None, 0)
    below = p("mul", _expm1(p, inner), alpha * scale)
    return p("where", p("gt", x, 0), p("mul", x, scale), below)


def _hardtanh(p: Instructions, kind: str, x: Any, min: Any = -1, max: Any = 1) -> Register:
    return _clamp(p, kind, x, min, max, "e")


def _hardsigmoid(p: Instructions, x: Register) -> Register:
    return p("div", _hardtanh(p, "f", p("add", x, 3), 0, 6), 6)


def _hardswish(p: Instructions, x: Register) -> Register:
    """x hardsigmoid(x), whose gradients at -3 and 3 are those of 0 and of x."""
    inner = p("where", p("ge", x, 3), x, p("mul", x, _hardsigmoid(p, x)))
    return p("where", p("le", x, -3), 0, inner)


RULES: dict[str, Rule] = {
    name: _each(name) for name in "exp log tanh sigmoid sqrt rsqrt sin cos neg abs".split()
}
RULES |= {name: _compared(name) for name in "eq ne lt le gt ge".split()}
RULES |= {f"logical_{name}": _logical(name) for name in "and or xor not".split()}
for _name in "and or xor not".split():
    RULES[f"bitwise_{_name}"] = RULES[f"__{_name}__"] = _each(_name, _name)
for _name, _long in (("shl", "left"), ("shr", "right")):
    RULES[f"bitwise_{_long}_shift"] = RULES[f"__{_long[0]}shift__"] = _each(_name)
# These leave a number as it is.
RULES |= dict.fromkeys(("_to_copy", "convert_element_type", "clone"), _converted)
RULES |= {
    "add": _add,
    "sub": lambda p, kind, a, b, alpha=1: _add(p, kind, a, b, alpha, "sub"),
    "rsub": lambda p, kind, a, b, alpha=1: _add(p, kind, b, a, alpha, "sub"),
    "mul": _each("mul", "and"),
    "div": _div,
    "floor_divide": _each("floordiv"),
    "remainder": _each("rem"),
    "fmod": _fmod,
    "minimum": _each("min", "and"),
    "maximum": _each("max", "or"),
    "clamp": lambda p, kind, x, min=None, max=None: _clamp(p, kind, x, min, max, _CLOSED),
    "clamp_min": lambda p, kind, x, end: _clamp(p, kind, x, end, None, _CLOSED),
    "clamp_max": lambda p, kind, x, end: _clamp(p, kind, x, None, end, _CLOSED),
    "where": _where,
    "masked_fill": lambda p, kind, x, mask, value: _where(p, kind, mask, value, x),
    "floor": _rounded(lambda p, x: p("floor", x)),
    "ceil": _rounded(_ceil),
    "trunc": _trunc,
    "round": _rounded(_round),  # `decimals` is not expected
    "sign": _sign,
    "sgn": _sign,
    "isnan": lambda p, _, x: p("ne", x, x),
    "pow": _pow,
    "square": lambda p, kind, x: _pow(p, kind, x, 2),
    "reciprocal": lambda p, kind, x: _pow(p, kind, x, -1),
    "exp2": _real(lambda p, x: p("exp", p("mul", x, math.log(2)))),
    "expm1": _real(_expm1),
    "log2": _real(lambda p, x: p("div", p("log", x), math.log(2))),
    "log10": _real(lambda p, x: p("div", p("log", x), math.log(10))),
    "log1p": _real(_log1p),
    "xlogy": lambda p, _, x, y: _xlog(p, x, y, lambda p, y: p("log", y), 0),
    "special_xlog1py": lambda p, _, x, y: _xlog(p, x, y, _log1p, -1),
    "sinc": _real(_sinc),
    "tan": _real(lambda p, x: p("div", p("sin", x), p("cos", x))),
    "relu": lambda p, kind, x: _hardtanh(p, kind, x, 0, None),
    "hardtanh": _hardtanh,
    "hardsigmoid": _real(_hardsigmoid),
    "hardswish": _real(_hardswish),
    "softplus": _real(_softplus),
    "elu": _real(_elu),
    "celu": _real(lambda p, x, alpha=1: _elu(p, x, alpha, 1, 1 / alpha)),
    "silu": _real(lambda p, x: p("mul", x, p("sigmoid", x))),
}
