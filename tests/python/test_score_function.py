"""A traced score function computes what torch.vmap of the function does, or is refused by name."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from forks import run_forked
from score_programs import evaluated, trace
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import qkv
from qkv import _recorded
from qkv._recorded import Refused
from qkv._score_function import instructions

B, H, L, S = 2, 3, 5, 7
torch.manual_seed(0)
SCORES = torch.randn(B, H, L, S, dtype=torch.float64) * 2
TABLE = torch.randn(H, L + S, dtype=torch.float64)
BIAS = torch.randn(B, H, L, S)
SLOPES = 2.0 ** -torch.arange(1.0, H + 1)
HALF = torch.randn(S).half()
IDS = torch.arange(S) // 3
SMALL = torch.arange(250, 250 + S).to(torch.uint8)
SEEN = torch.arange(S) % 3 > 0
LEARNED = torch.tensor(0.7, dtype=torch.float64)
POINTS = torch.randn(S, 3, dtype=torch.float64)
PLACES = torch.randint(5, (S, 2))
TURN = torch.randn(2, 3, dtype=torch.float64)
LONG = torch.randn(S, 33)
SPARSE = torch.eye(S).to_sparse()
INF = float("inf")

FUNCTIONS = {
    "identity": lambda s, b, h, q, k: s,
    "causal": lambda s, b, h, q, k: torch.where(q >= k, s, -INF),
    "relative causal": lambda s, b, h, q, k: torch.where(q >= k, s + (q - k), -INF),
    "alibi": lambda s, b, h, q, k: s + (k - q) * torch.exp2(-((h + 1) * 8.0 / H)),
    "slopes": lambda s, b, h, q, k: s - SLOPES[h] * (q - k).abs(),
    "soft cap": lambda s, b, h, q, k: 20 * torch.tanh(s / 20),
    "squared": lambda s, b, h, q, k: s * s,
    "trigonometry": lambda s, b, h, q, k: torch.sin(torch.cos(s)) + torch.tan(b),
    "table": lambda s, b, h, q, k: s + TABLE[h, q - k + S],
    "negative index": lambda s, b, h, q, k: s + TABLE[h, q - k],
    "rows of rows": lambda s, b, h, q, k: (
        s + BIAS[b][h][q, k] + BIAS[0][h, q][-1] + BIAS[b, h][1, k]
    ),
    "parts of a table": lambda s, b, h, q, k: (
        s + BIAS.unbind(0)[1][h, q, k] + TABLE.max(-1).values[h] + TABLE.split(2)[-1][0, q]
    ),
    "ellipsis": lambda s, b, h, q, k: s + BIAS[..., q, k][b, h] + BIAS[b, ..., k][h, q],
    "slices": lambda s, b, h, q, k: (
        s + TABLE[:2, q].sum() + TABLE[h, 1::2][k // 2] + BIAS[..., None, h, q, 1:][b, 0, k // 2]
    ),
    "clamped window": lambda s, b, h, q, k: s + TABLE[h, torch.clamp(q - k + 2, 0, 4)],
    "all dimensions": lambda s, b, h, q, k: s + HALF[q] + HALF[k] + SLOPES[h],
    "rows of a table": lambda s, b, h, q, k: (
        s + TABLE[:, IDS][h, q] + TABLE[:, IDS][h][k] + F.embedding(PLACES[:, 0], POINTS)[q, 1]
    ),
    "indirect": lambda s, b, h, q, k: s + HALF[IDS[q]],
    "gate": lambda s, b, h, q, k: s * torch.sigmoid(SLOPES[h].to(torch.float32)),
    "computed table": lambda s, b, h, q, k: s + (TABLE.double() * 2).exp()[h, q] * SLOPES.sum(),
    "learned": lambda s, b, h, q, k: s * LEARNED.exp(),
    "documents": lambda s, b, h, q, k: torch.where((IDS[q] == IDS[k]) & (q >= k), s, -INF),
    "booleans": lambda s, b, h, q, k: s.masked_fill(SEEN[q] == SEEN[k], -1e4) + SEEN[k],
    "like what has no instructions": lambda s, b, h, q, k: (
        s + torch.ones_like(torch.erf(s)) + torch.zeros_like(LONG[q] * 2).sum()
    ),
    "neighbourhood": lambda s, b, h, q, k: torch.where(
        ((q / 3 - k / 3).abs() <= 1) | ((q % 3 - k % 3).abs() <= 1), s, -INF
    ),
    "divisions": lambda s, b, h, q, k: (
        s - q // (1 + k) + torch.div(q - 3, k + 1, rounding_mode="trunc") + torch.fmod(q - k, 3)
        + torch.remainder(k - q, -3) + s // 0.7 + s % -0.7 + torch.fmod(s, 0.3)
        + torch.div(s, 0.7, rounding_mode="trunc") + torch.div(q - k, 2, rounding_mode="floor")
    ),
    "integers": lambda s, b, h, q, k: s + ((q << 2) ^ (k >> 1) | 5) + ~q + q**3 + (q > 1) * (k < 3),
    "shifts by any count": lambda s, b, h, q, k: (
        s + (5 << (9 * (q - 2))) + (-k >> (20 * q)) + (k >> (q - 2))
    ),
    "narrow": lambda s, b, h, q, k: s + (SMALL[q] + SMALL[k]) + (SMALL[k] - SMALL[q].char()),
    "rounding": lambda s, b, h, q, k: s.floor() + s.ceil() * 2 + s.trunc() + (s * 2).round() / 3,
    "powers": lambda s, b, h, q, k: s**3 + (s * s + 1) ** -0.5 + s**-2 + 2**s + (s * s) ** 1.5,
    "logarithms": lambda s, b, h, q, k: (
        torch.log1p(s * s) + torch.log2(s * s) + torch.expm1(s) + torch.exp2(s) + s.abs().rsqrt()
    ),
    "activations": lambda s, b, h, q, k: (
        F.silu(s) + F.softplus(s, 2) + F.gelu(s, approximate="tanh") + F.elu(s) + F.celu(s, 2.0)
        + F.logsigmoid(s) + F.relu(s) + F.leaky_relu(s) + F.hardswish(s) + torch.logaddexp(s, s * 2)
    ),
    "rows without a gradient": torch.no_grad()(
        lambda s, b, h, q, k: b + (PLACES[q] - PLACES[k]).view(2, 1).abs().sum().float()
    ),
    "rows": lambda s, b, h, q, k: (
        s * ((POINTS[q] - POINTS[k]) * torch.tensor([1.0, 2.0, 3.0])).norm()
        + (POINTS[q] * POINTS[k]).mean() + POINTS[k].amax() - (POINTS[q] + s).prod(-1)
        + (TURN * POINTS[q]).sum(-1)[1] + (TURN * POINTS[k][None]).sum((0, 1)) + TURN[1, 2]
        + torch.where(POINTS[q] > POINTS[k], POINTS[q], s).amin(0) + POINTS.mT[:, k].square().sum()
    ),
    "in place": lambda s, b, h, q, k: s.mul(2).add_(q).sub_(1),
    "made inside": lambda s, b, h, q, k: s * torch.tensor([1.0, 2.0, 4.0])[h] + torch.full((), 3),
}  # fmt: skip


def over_the_grid(function, scores=SCORES):
    for dims in ((0, None, None, None, 0), (0, None, None, 0, None), (0, None, 0, None, None)):
        function = torch.vmap(function, dims)
    function = torch.vmap(function, (0, 0, None, None, None))
    index = (torch.arange(n, dtype=torch.int32) for n in SCORES.shape)
    from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

    with TransformGetItemToIndex():
        return function(scores.clone(), *index)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_computes_what_the_function_does(name):
    found = evaluated(trace(FUNCTIONS[name], torch.float64), SCORES)
    true = over_the_grid(FUNCTIONS[name])
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, true.double(), rtol=1e-6, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("n", [0, 1, 3, 65, 66, -65, -2, 0.5, 0.3, 1.5, 2.5, 100.5, -0.3, -2.5])
def test_powers_of_what_is_at_an_end(isa, n):
    """Of 0, of infinities and of negative numbers, with the gradients that are numbers."""
    query = torch.tensor([0.0, INF, -INF, torch.nan, -2, -1, 1, 1.25]).double()[:, None]
    one = torch.ones(1, 1, 1, 1, dtype=torch.float64)

    def power(s, *_):  # an infinite score has no log-sum-exp
        found = s**n
        return torch.where(found.abs() > 1e300, 3 * found.sign(), found)

    leaf = query.requires_grad_()
    _, lse = qkv.flex_attention(leaf[None, None], one, one, power, scale=1.0, return_lse=True)
    expected = power(query)
    torch.testing.assert_close(
        lse.flatten(), expected.flatten(), rtol=1e-9, atol=1e-12, equal_nan=True
    )
    found, gradient = (torch.autograd.grad(x.sum(), leaf)[0] for x in (lse, expected))
    kept = gradient.isfinite() & expected.isfinite()
    torch.testing.assert_close(found[kept], gradient[kept], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    "f",
    [
        F.relu, F.relu6, F.hardtanh, F.hardsigmoid, F.hardswish, lambda s: s.clamp(-3, 3),
        lambda s: torch.sinc(s.clamp(-3, 3)),
        lambda s: torch.xlogy(s, 2), lambda s: torch.xlogy(s.clamp(0, 0), -1),
        lambda s: torch.special.xlog1py(s, 2),
    ],
)  # fmt: skip
def test_gradients_at_the_ends_are_those_of_torch(f):
    query = torch.tensor([-3.0, -1, 0, 1, 3, 6, torch.inf], dtype=torch.float64)
    leaf = query[:, None].requires_grad_()
    one = torch.ones(1, 1, 1, 1, dtype=torch.float64)
    _, lse = qkv.flex_attention(
        leaf[None, None], one, one, lambda s, *_: f(s).clamp(max=1e9), scale=1.0, return_lse=True
    )
    expected = f(leaf).clamp(max=1e9)
    torch.testing.assert_close(lse.flatten(), expected.flatten())
    found, expected = (torch.autograd.grad(x.sum(), leaf) for x in (lse, expected))
    torch.testing.assert_close(found, expected)


def test_torch_is_asked_for_its_clamp_under_any_mode():
    """The first call of a process may be one of fake tensors, which have no numbers."""
    with FakeTensorMode():
        assert instructions._gradient_at_end() == (instructions._CLOSED == "t")


NEAR_ZERO = {
    "expm1": (torch.expm1, lambda s: torch.expm1(s) / s),
    "log1p": (torch.log1p, lambda s: torch.log1p(s) / s),
    "elu": (F.elu, lambda s: F.elu(s) / s),
    "softplus": (lambda s: F.softplus(s - 20), lambda s: F.softplus(s - 20) * 4e8),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", NEAR_ZERO)
def test_digits_of_small_numbers(isa, name, dtype):
    """Held by what is near 1 beside them, since a log-sum-exp has no more digits; and gradients."""
    numbers = [1e-30, 1e-12, -1e-9, 3e-8, 1e-7, -1e-5, 0.01, -0.3, 0.49, -0.49, 0.51, -0.7, 3, -3]
    query = torch.tensor(numbers, dtype=dtype)[: -1 if name == "log1p" else None, None]
    one = torch.ones(1, 1, 1, 1, dtype=dtype)

    def lse(query, f):  # of one key: its score
        call = (query[None, None], one, one, lambda s, *_: f(s))
        return qkv.flex_attention(*call, scale=1.0, return_lse=True)[1].flatten()

    near = {"rtol": 50 * torch.finfo(dtype).eps, "atol": 0, "check_dtype": False}
    f, beside = NEAR_ZERO[name]
    torch.testing.assert_close(lse(query, beside), beside(query.double()).flatten(), **near)
    found, expected = (x.clone().requires_grad_() for x in (query, query.double()))
    lse(found, f).sum().backward()
    f(expected).sum().backward()
    torch.testing.assert_close(found.grad, expected.grad, **near)


def branch(s, b, h, q, k):
    return s if q > k else s * 2


REFUSED = {
    "_local_scalar_dense": branch,
    "aten.rand": lambda s, b, h, q, k: s + torch.rand(()),
    "tolist": lambda s, b, h, q, k: s + BIAS.tolist()[0],
    "has views": lambda s, b, h, q, k: s + BIAS.unbind(0)[1].mul_(2)[h, q, k],
    "add.out writes into a tensor, in": lambda s, *_: torch.add(s, 1, out=torch.empty(())),
    "detach_ changes a tensor": lambda s, b, h, q, k: s + (TABLE * 1).detach_()[h, q],
    "gives a bool of a tensor": lambda s, b, h, q, k: s + TABLE.is_same_size(BIAS),
    "_dense.default reads": lambda s, b, h, q, k: s + TABLE[h, q:][k],
    "is captured": lambda s, b, h, q, k: s + BIAS.mul_(2)[b, h, q, k],
    "aten.erf": lambda s, b, h, q, k: torch.erf(s),
    "shape \\[33\\]": lambda s, b, h, q, k: s + LONG[q].sum(),
    "aten.flip": lambda s, b, h, q, k: s + POINTS[q].flip(0)[1],
    "without a gradient": lambda s, b, h, q, k: s - s.detach(),
    "view.dtype, .*these are expected": lambda s, b, h, q, k: s + q.view(torch.float32),
    "view.dtype, .*these are": lambda s, b, h, q, k: s + POINTS[q].view(torch.int64).sum(),
    "gives torch.bool": lambda s, b, h, q, k: q >= k,
    "gives float": lambda s, b, h, q, k: 0.0,
    "index 9 of 3": lambda s, b, h, q, k: s + TABLE[9, q],
    "add.Tensor, .* 1099511627776 is no int32": lambda s, b, h, q, k: s + (q.long() + 2**40),
    "makes a number, .* is no int32": lambda s, b, h, q, k: s + q.long() * torch.tensor(2**40),
    "an exponent that is a number is expected": lambda s, b, h, q, k: s**s,
    "infinity to integer": lambda s, b, h, q, k: s**INF,
    "round.decimals, .*these are expected: abs, ": lambda s, *_: torch.round(s, decimals=2),
    "looks up at torch.int32, \\[1\\]": lambda s, b, h, q, k: s + TABLE[h, q[None]].sum(),
    "shape \\[3, 33\\]": lambda s, b, h, q, k: s + (POINTS[q][:, None] * LONG[k]).sum(),
    "'SPARSE' on cpu, torch.sparse_coo, .*dense": lambda s, b, h, q, k: s + SPARSE[h, q],
    "complex64": lambda s, b, h, q, k: s + BIAS.to(torch.complex64)[b, h, q, k].real,
}


@pytest.mark.parametrize("words", REFUSED)
def test_refusals_name_the_operation_and_the_line(words):
    line = REFUSED[words].__code__.co_firstlineno
    with pytest.raises(Refused, match=words) as error:
        trace(REFUSED[words], torch.float32)
    line += words == "_local_scalar_dense"  # the line of its `if`
    assert __file__ in str(error.value) and f"line {line}" in str(error.value)


@pytest.mark.parametrize("divisor", [0.1, -0.1, float("inf"), -float("inf"), -1e20])
@pytest.mark.parametrize("f", [torch.floor_divide, torch.remainder, torch.fmod])
def test_quotients_that_a_division_rounds(f, divisor):
    """1 / 0.1 is 10 in float64, and 0.1 is more than a tenth of 1; 1 - 1e20 is -1e20."""
    query = torch.tensor([1.0, 3.0, 0.5], dtype=torch.float64).view(1, 1, 3, 1)
    key = torch.ones(1, 1, 3, 1, dtype=torch.float64)
    _, lse = qkv.flex_attention(
        query, key, key, lambda s, b, h, i, j: f(s, divisor), return_lse=True
    )
    torch.testing.assert_close(lse, f(query @ key.mT, divisor).logsumexp(-1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_is_no_int32_is_the_smallest_one(dtype):
    scores = torch.tensor([3e9, -5e9, 2.0**31, -(2.0**31), float("nan"), 2.0**31 - 129, -7.9])
    query = scores.to(dtype).view(1, 1, -1, 1)
    one = torch.ones_like(query[:, :, :1])
    found = qkv.flex_attention(query, one, one, lambda s, *_: s.int() * 1.0, return_lse=True)[1]
    assert torch.equal(found.flatten(), scores.int().to(found.dtype))


def test_numbers_beyond_int32_are_an_error_by_name():
    far = torch.tensor([0, 2**31])
    with pytest.raises(ValueError, match="'far' has 2147483648"):
        trace(lambda s, b, h, q, k: s + far[h], torch.float32)
    with pytest.raises(ValueError, match=r"a captured tensor of shape \[2\] has 2147483648"):
        trace(partial(lambda far, s, b, h, q, k: s + far[h], far), torch.float32)

    def of_sample(far):
        return trace(lambda s, b, h, q, k: s + far[h], torch.float32).indices

    with pytest.raises(ValueError, match="'far' has 2147483648"):
        torch.vmap(of_sample)(torch.stack([far // 2, far]))


def test_a_function_that_no_line_is_known_of(monkeypatch):
    """One of C, in a thread that begins within torch or qkv."""
    monkeypatch.setattr(_recorded, "_NOT_OF_USERS", ("",))
    with pytest.raises(Refused, match=r'in <built-in function max> \("\?", line 0\)'):
        trace(max, torch.float32)


def test_one_table_is_not_copied_and_gets_its_gradient():
    table = torch.randn(H, L + S, requires_grad=True)
    program = trace(lambda s, b, h, q, k: s + table[h, q] * table[h, k], torch.bfloat16)
    assert program.tables.data_ptr() == table.data_ptr() and program.text.count("@") == 1
    program.tables.sum().backward()
    assert torch.equal(table.grad, torch.ones_like(table))


def test_a_table_gets_no_gradient_of_what_is_without_one():
    table = torch.randn(H, requires_grad=True)
    gate = torch.no_grad()(lambda: table.exp())
    program = trace(lambda s, b, h, q, k: s + table[h] + gate()[q], torch.float32)
    torch.testing.assert_close(program.tables, torch.cat([table, table.exp()]))
    program.tables.sum().backward()
    assert torch.equal(table.grad, torch.ones(H))


@pytest.mark.parametrize("is_row", [False, True])
def test_what_is_looked_up_without_a_gradient(is_row):
    table = torch.randn(H, L + S, requires_grad=True)

    def score_mod(s, b, h, q, k):
        with torch.no_grad():
            found = table[h] if is_row else table[h, q]
        return s + (found[q] if is_row else found) * table[h, k]

    program = trace(score_mod, torch.float32)
    assert torch.equal(program.tables, torch.cat([table.flatten()] * 2))
    program.tables.sum().backward()
    assert torch.equal(table.grad, torch.ones_like(table))


def test_padding_of_an_embedding_gets_no_gradient():
    weights = torch.randn(2, L + S, H, requires_grad=True)

    def score_mod(s, b, h, q, k):
        found = F.embedding(q + k, weights[1], padding_idx=3)[h]
        return s + found + F.embedding(k, weights[b], padding_idx=3)[h]

    program = trace(score_mod, torch.float32)
    program.tables.sum().backward()
    expected = torch.ones_like(weights)  # of one table
    expected[:, 3] = 0
    assert torch.equal(weights.grad, expected)


@pytest.mark.parametrize("through", ["grad", "jvp", "vmap"])
def test_captured_tensors_of_torch_func(through):
    def tables(w):
        return trace(lambda s, b, h, q, k: s + w[h] + w.exp()[q], torch.float32).tables

    w = torch.randn(3)
    true = torch.cat([w, w.exp()])
    if through == "grad":
        grad = torch.func.grad(lambda w: tables(w).sum())(w)
        torch.testing.assert_close(grad, 1 + w.exp())
    elif through == "jvp":
        tangent = torch.func.jvp(tables, (w,), (torch.ones(3),))[1]
        torch.testing.assert_close(tangent, torch.cat([torch.ones(3), w.exp()]))
    else:
        torch.testing.assert_close(torch.vmap(tables)(w[None]), true[None])


@pytest.mark.parametrize(
    "record",
    [
        lambda f, *x: torch.jit.trace(f, x, check_trace=False),
        lambda f, *x: make_fx(f)(*x),
        lambda f, *x: make_fx(f, pre_dispatch=True)(*x),
    ],
    ids=["jit", "make_fx", "pre_dispatch"],
)
@pytest.mark.filterwarnings(
    "ignore::torch.jit.TracerWarning", "ignore:.torch.jit:DeprecationWarning"
)
def test_integers_of_what_is_recorded_are_no_constants(record):
    """They were, where a call before it had made the table already."""
    x, documents = torch.randn(1, 2, 8, 4), torch.arange(8) // 4

    def call(x, ids):
        hide = lambda s, b, h, q, k: torch.where(ids[q] == ids[k], s, -torch.inf)  # noqa: E731
        return qkv.flex_attention(x, x, x, hide)

    call(x, documents)
    recorded = record(call, x, documents)
    others = torch.arange(8) // 2
    torch.testing.assert_close(recorded(x, others), call(x, others))


def test_a_table_that_jit_refuses():
    """torch.jit.trace says so when it is asked for the table's sizes, and ended in a segmentation
    fault if that was caught."""
    code = """
import torch, qkv
table, x = torch.randn(20, requires_grad=True), torch.randn(1, 2, 5, 8)
call = lambda x: qkv.flex_attention(x, x, x, lambda s, b, h, q, k: s + table[q - k + 7])
try:
    torch.jit.trace(call, (x,), check_trace=False)
except RuntimeError as error:
    print(error)
"""
    assert "Cannot insert a Tensor that requires grad as a constant" in run_forked(code)


@pytest.mark.parametrize("indices", [3, 4])
def test_too_many_indices(indices):
    """What torch says of a tensor and numbers."""
    table = torch.zeros(2, 3)
    with pytest.raises(IndexError, match="too many indices for tensor of dimension 2"):
        trace(lambda s, *place: s + table[place[:indices]], torch.float32)


def test_what_is_no_function():
    """By every function that takes one."""
    query, ends = torch.zeros(1, 2, 4, 8), torch.tensor([0, 4])
    packed = query[0].transpose(0, 1)
    for call in (
        lambda: qkv.flex_attention(query, query, query, 3),
        lambda: qkv.varlen_attn(packed, packed, packed, ends, None, 4, 4, score_mod=3),
        lambda: qkv.attention_with_kvcache(query, query, query, score_mod=3),
    ):
        with pytest.raises(ValueError, match="score_mod is 3, but a function or None is expected"):
            call()


def test_recorders_are_imported_when_a_function_is_given():
    """They are a tenth of what `import qkv` took."""
    code = "import sys, qkv; print({'qkv._recorded', 'qkv._score_function.cache'} & {*sys.modules})"
    assert run_forked(code).strip() == "set()"
