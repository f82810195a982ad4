"""torch.autocast("cpu") covers the operators as it covers scaled_dot_product_attention."""

import pytest
import torch
from torch.nn import functional as F

import qkv

HALVES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "f16"])


def make(requires_grad=True):
    shapes = [(2, 4, 6, 8), (2, 4, 9, 8), (2, 4, 9, 8), (6, 9), (4,), (4,)]
    return [torch.randn(s).requires_grad_(requires_grad) for s in shapes]


def attention(query, key, value, mask, slopes, sinks):
    return qkv.attention(query, key, value, mask, alibi_slopes=slopes, sinks=sinks)


def varlen(query, key, value, mask, slopes, sinks):
    rows = [x[0].transpose(0, 1) for x in (query, key, value)]
    ends = torch.tensor([0, 2, 6]), torch.tensor([0, 4, 9])
    return qkv.varlen_attn(*rows, *ends, 4, 5, alibi_slopes=slopes, sinks=sinks)


def weights(query, key, value, mask, slopes, sinks):
    return qkv.attention_weights(query, key, mask, alibi_slopes=slopes, sinks=sinks)


def hard(query, key, value, mask, slopes, sinks):
    options = {"alibi_slopes": slopes, "straight_through": True}
    return qkv.hard_attention(query, key, value, mask, **options)


OPERATORS = pytest.mark.parametrize("operator", [attention, varlen, weights, hard])


def cast(inputs, dtype):
    """As autocast has it: query, key, value and mask; not slopes and sinks."""
    return [x.to(dtype) for x in inputs[:4]] + inputs[4:]


def gradients(result, inputs):
    return torch.autograd.grad(result.float().sin().sum(), inputs, allow_unused=True)


def check_same(actual, expected):
    for a, e in zip(actual, expected, strict=True):
        assert (a is None) == (e is None)
        assert a is None or (a.dtype == e.dtype and torch.equal(a, e))


@HALVES
@OPERATORS
def test_results_and_gradients_are_those_of_tensors_cast_by_hand(operator, dtype):
    inputs = make()
    with torch.autocast("cpu", dtype=dtype):
        actual = operator(*inputs)
    expected = operator(*cast(inputs, dtype))
    assert actual.dtype == dtype
    assert torch.equal(actual, expected)
    check_same(gradients(actual, inputs), gradients(expected, inputs))


@OPERATORS
def test_float64_and_what_comes_with_it_is_left_alone(operator):
    inputs = [x.double() for x in make()[:3]] + make()[3:]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(operator(*inputs), operator(*inputs).double())


def test_dtypes_are_those_of_torchs_attention():
    query = torch.randn(2, 4, 6, 8)
    calls = {
        "float32": [query] * 3,
        "float64": [query.double()] * 3,
        "other half": [query.half()] * 3,
        "mixed": [query, query.half(), query.bfloat16()],
        "bool mask": [query, query, query, torch.ones(6, 6, dtype=torch.bool)],
        "float mask": [query, query, query, torch.zeros(6, 6)],
        "meta": [query.to("meta")] * 3,
    }
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for name, call in calls.items():
            expected = F.scaled_dot_product_attention(*call)
            assert qkv.attention(*call).dtype == expected.dtype, name


def test_a_module_trains_under_autocast():
    """Linear layers, whose weights autocast keeps cast, and a backward pass outside."""

    class Layer(torch.nn.Module):
        def __init__(self, attend):
            super().__init__()
            self.qkv, self.attend = torch.nn.Linear(16, 48), attend

        def forward(self, x):
            heads = self.qkv(x).unflatten(-1, (3, 2, 8)).movedim(-3, 0).transpose(-2, -3)
            return self.attend(*heads, is_causal=True)

    torch.manual_seed(0)
    ours, theirs = Layer(qkv.attention), Layer(F.scaled_dot_product_attention)
    theirs.load_state_dict(ours.state_dict())
    x = torch.randn(3, 10, 16)
    for layer in (ours, theirs):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            output = layer(x) + layer(-x)
        assert output.dtype == torch.bfloat16
        output.float().square().mean().backward()
    actual, expected = ours.qkv.weight.grad, theirs.qkv.weight.grad
    assert actual.dtype == torch.float32
    assert (actual - expected).norm() < 0.02 * expected.norm()  # bfloat16: 2**-8 a rounding


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_programs(backend):
    inputs = make()
    compiled = torch.compile(attention, backend=backend, fullgraph=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected, actual = attention(*inputs), compiled(*inputs)
    assert actual.dtype == torch.bfloat16
    assert torch.equal(actual, expected)
    check_same(gradients(actual, inputs), gradients(expected, inputs))
    assert compiled(*inputs).dtype == torch.float32  # outside: compiled again


def test_function_transforms():
    inputs = [x.detach() for x in make()[:3]]

    def loss(*inputs):
        output = qkv.attention(*inputs)
        assert output.dtype == torch.bfloat16
        return output.float().sin().sum()

    per_sample = torch.vmap(torch.func.grad(loss, argnums=(0, 1, 2)))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual = per_sample(*inputs)
    leaves = [x.requires_grad_() for x in inputs]
    output = qkv.attention(*(x.bfloat16() for x in leaves))
    check_same(actual, torch.autograd.grad(output.float().sin().sum(), leaves))


def test_reentrant_backward_passes_are_not_cast():
    """Backward inside autocast, of a call outside it."""
    inputs = make()
    expected = gradients(hard(*inputs), inputs)
    outside = hard(*inputs)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        check_same(gradients(outside, inputs), expected)


def test_errors_name_the_argument():
    query = torch.randn(2, 4, 6, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with pytest.raises(RuntimeError, match="key is float64, but query is bfloat16"):
            qkv.attention(query, query.double(), query)
        with pytest.raises(RuntimeError, match="attn_mask is float64, but bool, float32"):
            qkv.attention(query, query, query, torch.zeros(6, 6, dtype=torch.float64))
