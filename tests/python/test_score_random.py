"""Drawn score functions: what is traced computes what torch.vmap of the function does."""

import operator

import torch
from hypothesis import given
from hypothesis import strategies as st
from score_programs import evaluated, trace
from test_score_function import B, H, L, S, over_the_grid

SCORES = torch.randn(B, H, L, S, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
FLOATS = torch.randn(H, L + S, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
INTEGERS = torch.arange(L + S) * 5 % 7 - 2

# An expression is a function of (s, b, h, q, k). Those with the same kinds and number of operands
# stand in one list.
ARGUMENTS = dict(zip("sbhqk", (operator.itemgetter(n) for n in range(5)), strict=True))
INTEGER_PAIRS = [operator.add, operator.sub, operator.mul, torch.minimum, torch.maximum,
                 lambda x, y: x // (y.abs() + 1), lambda x, y: x % (y.abs() + 1)]  # fmt: skip
COMPARISONS = [operator.lt, operator.le, operator.gt, operator.ge, operator.eq, operator.ne]
LOGICALS = [operator.and_, operator.or_, operator.xor]
FLOAT_PAIRS = [operator.add, operator.sub, operator.mul, torch.minimum, torch.maximum,
               lambda x, y: x / (y * y + 1)]  # fmt: skip
FLOAT_SINGLES = [operator.neg, torch.abs, torch.tanh, torch.sigmoid, torch.sin, torch.cos,
                 torch.square, lambda x: torch.exp(-x * x), lambda x: torch.log(x * x + 1),
                 lambda x: torch.sqrt(x * x + 0.5), lambda x: x**3,
                 torch.nn.functional.silu, torch.nn.functional.relu]  # fmt: skip


def applied(function, *inputs):
    return lambda a: function(*(x(a) for x in inputs))


def looked_up_integer(x):
    return lambda a: INTEGERS[x(a) % (L + S)]


def looked_up_float(x):
    return lambda a: FLOATS[a[2], x(a) % (L + S)]


def of(functions, *inputs):
    return st.builds(applied, st.sampled_from(functions), *inputs)


places = st.sampled_from([ARGUMENTS[name] for name in "bhqk"])
integers = st.recursive(
    places,
    lambda x: st.one_of(
        of(INTEGER_PAIRS, x, x),
        st.builds(looked_up_integer, x),
        st.builds(lambda x, n: lambda a: x(a) + n, x, st.integers(-9, 9)),
    ),
    max_leaves=4,
)
conditions = st.recursive(
    of(COMPARISONS, integers, integers),
    lambda x: st.one_of(of(LOGICALS, x, x), of([operator.invert], x)),
    max_leaves=3,
)
floats = st.recursive(
    st.one_of(st.just(ARGUMENTS["s"]), st.builds(looked_up_float, integers)),
    lambda x: st.one_of(
        of(FLOAT_PAIRS, x, x),
        of(FLOAT_SINGLES, x),
        of([torch.where], conditions, x, x),
        of([operator.add, operator.mul], x, integers),
        st.builds(lambda x, c: lambda a: x(a) * c, x, st.floats(-2, 2, width=16)),
    ),
    max_leaves=6,
)
hidden = st.one_of(st.none(), conditions)


@given(floats, hidden)
def test_drawn_functions(expression, mask):
    def score_mod(*arguments):
        found = expression(arguments)
        return found if mask is None else torch.where(mask(arguments), found, -torch.inf)

    found = evaluated(trace(score_mod, torch.float64), SCORES)
    torch.testing.assert_close(
        found, over_the_grid(score_mod, SCORES), rtol=1e-9, atol=1e-9, equal_nan=True
    )
