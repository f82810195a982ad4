"""Under torch.autocast every function does what scaled_dot_product_attention does there."""

import pytest
import torch
import torch.nn.functional as F
from blocks import Block
from common import COMPILERS, compute_type, dtypes_of
from test_half import FUNCTIONS, assert_close, make
from torch import autocast
from torch.nested import nested_tensor_from_jagged
from torch.utils.checkpoint import checkpoint

import qkv

halves = dtypes_of("bf16", "f16")
functions = pytest.mark.parametrize("name", FUNCTIONS)
Q = torch.randn(2, 3, 9, 8)


def run(f, leaves, dtype=None):
    """Results and gradients of f; the forward pass is under autocast if there is a dtype."""
    torch.manual_seed(2)
    with autocast("cpu", dtype=dtype, enabled=dtype is not None):
        results = f(*leaves)
    loss = sum(x.float().sin().sum() for x in results)
    return results, torch.autograd.grad(loss, leaves, materialize_grads=True)


@functions
@halves
class TestEveryFunction:
    def test_inputs_are_cast(self, name, dtype):
        """Results have the bits of a call whose inputs were cast by hand; gradients have the dtype
        of the inputs."""
        leaves = [x.requires_grad_() for x in make(torch.float32)]
        results, grads = run(FUNCTIONS[name], leaves, dtype)
        expected, truths = run(lambda *x: FUNCTIONS[name](*(y.to(dtype) for y in x)), leaves)
        assert results[0].dtype == dtype
        for x, y in zip((*results, *grads), (*expected, *truths), strict=True):
            assert x.dtype == y.dtype and torch.equal(x, y)
        assert all(g.dtype == torch.float32 for g in grads)

    def test_other_half(self, name, dtype):
        """Inputs in one half precision are cast to the other."""
        for given in (torch.bfloat16, torch.float16):
            with autocast("cpu", dtype=dtype):
                assert FUNCTIONS[name](*make(given))[0].dtype == dtype

    def test_mixed_inputs(self, name, dtype):
        """Inputs of several dtypes: the output of a linear layer and an f32 cache, say."""
        query, key, value = make(torch.float32)
        torch.manual_seed(2)
        expected = FUNCTIONS[name](*(x.to(dtype) for x in (query, key, value)))
        torch.manual_seed(2)
        with autocast("cpu", dtype=dtype):
            found = FUNCTIONS[name](query.to(dtype), key, value)
        for x, y in zip(found, expected, strict=True):
            assert torch.equal(x, y)

    def test_disabled_inside(self, name, dtype):
        inputs = make(torch.float32)
        with autocast("cpu", dtype=dtype), autocast("cpu", enabled=False):
            assert FUNCTIONS[name](*inputs)[0].dtype == torch.float32
        assert FUNCTIONS[name](*inputs)[0].dtype == torch.float32

    def test_nested(self, name, dtype):
        inputs, other = (
            make(torch.float32),
            {torch.bfloat16: torch.float16}.get(dtype, torch.bfloat16),
        )
        with autocast("cpu", dtype=dtype):
            with autocast("cpu", dtype=other):
                assert FUNCTIONS[name](*inputs)[0].dtype == other
            assert FUNCTIONS[name](*inputs)[0].dtype == dtype

    @pytest.mark.one_in(4)
    @pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
    @pytest.mark.parametrize("where", ["inside", "outside"])
    def test_compile(self, name, dtype, where):
        torch.compiler.reset()

        def inside(*x):
            with autocast("cpu", dtype=dtype):
                return tuple(y * 1 for y in FUNCTIONS[name](*x))

        leaves = [x.requires_grad_() for x in make(torch.float32)]
        f = inside if where == "inside" else FUNCTIONS[name]
        own = None if where == "inside" else dtype
        expected = run(f, leaves, own)
        found = run(torch.compile(f, backend="aot_eager", fullgraph=True), leaves, own)
        for x, y in zip(found, expected, strict=True):
            assert [z.dtype for z in x] == [z.dtype for z in y]
            assert_close(x, y, dtype)

    def test_checkpoint(self, name, dtype):
        """The second forward pass, which a checkpoint makes, is under autocast, too."""
        leaves, f = [x.requires_grad_() for x in make(torch.float32)], FUNCTIONS[name]
        again = lambda *x: checkpoint(f, *x, use_reentrant=False)  # noqa: E731
        for x, y in zip(run(again, leaves, dtype), run(f, leaves, dtype), strict=True):
            assert all(torch.equal(*z) for z in zip(x, y, strict=True))

    def test_vmap_and_functional_gradient(self, name, dtype):
        inputs, f = make(torch.float32, (3,)), FUNCTIONS[name]
        loss = lambda *x: f(*x)[0].float().sin().sum()  # noqa: E731
        gradient = torch.func.grad(loss, (0, 1, 2))
        with autocast("cpu", dtype=dtype):
            torch.manual_seed(2)
            results = torch.func.vmap(f, randomness="same")(*inputs)
            torch.manual_seed(2)
            grads = torch.func.vmap(gradient, randomness="same")(*inputs)
        assert results[0].dtype == dtype and all(g.dtype == torch.float32 for g in grads)
        for n, sample in enumerate(zip(*inputs, strict=True)):
            leaves = [x.requires_grad_() for x in sample]
            expected, _ = run(f, leaves, dtype)
            assert_close([x[n] for x in results], expected, dtype)
            _, expected = run(lambda *x: f(*x)[:1], leaves, dtype)
            # The gradients are sums of rounded terms, in f32.
            for x, y in zip(grads, expected, strict=True):
                assert_close([x[n].to(dtype)], [y], dtype)


@pytest.mark.parametrize("name", ["attention", "varlen", "hard", "weights"])  # no float mask
@halves
def test_f64_stays(name, dtype):
    leaves = [x.requires_grad_() for x in make(torch.float64)]
    results, grads = run(FUNCTIONS[name], leaves, dtype)
    expected, truths = run(FUNCTIONS[name], leaves)
    for x, y in zip((*results, *grads), (*expected, *truths), strict=True):
        assert x.dtype == torch.float64 and torch.equal(x, y)


def outcome(f, *args, **options):
    """The dtype of f's result, or "error" if there is none."""
    try:
        return f(*args, **options).dtype
    except RuntimeError:
        return "error"


DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


@halves
@pytest.mark.parametrize("given", DTYPES)
@pytest.mark.parametrize("mask", [None, torch.bool, *DTYPES])
def test_same_dtypes_as_torchs(dtype, given, mask):
    query = Q.to(given)
    mask = None if mask is None else torch.ones(9, 9).to(mask)
    with autocast("cpu", dtype=dtype):
        expected = outcome(F.scaled_dot_product_attention, query, query, query, mask)
        if given == torch.float64 and mask is not None and mask.dtype == torch.float32:
            assert expected == "error"  # torch casts the mask alone
            expected = given
        assert outcome(torch.ops.qkv.attention, query, query, query, mask) == expected
        assert outcome(qkv.attention, query, query, query, mask) == expected


def test_meta_and_mixed_dtypes():
    calls = [Q.to("meta")] * 3, [Q, Q.half(), Q.bfloat16()], [Q.half(), Q, Q]
    with autocast("cpu", dtype=torch.bfloat16):
        for call in calls:
            expected = F.scaled_dot_product_attention(*call)
            assert qkv.attention(*call).dtype == expected.dtype


def test_errors_name_the_argument():
    with autocast("cpu", dtype=torch.bfloat16):
        with pytest.raises(RuntimeError, match="key is float64, but query is bfloat16"):
            qkv.attention(Q, Q.double(), Q)
        with pytest.raises(RuntimeError, match="attn_mask is float64, but bool, float32"):
            qkv.attention(Q, Q, Q, torch.zeros(9, 9, dtype=torch.float64))


@halves
def test_lse_stays_f32(dtype):
    with autocast("cpu", dtype=dtype):
        output, lse = qkv.attention(Q, Q, Q, return_lse=True)
    assert output.dtype == dtype and lse.dtype == compute_type(dtype) == torch.float32


@halves
def test_options_keep_their_dtypes(dtype):
    """A mask is cast like query; slopes and sinks are numbers of f64 in the kernel anyway."""
    mask, slopes, sinks = torch.randn(9, 9), torch.rand(3), torch.randn(3)
    leaves = [x.requires_grad_() for x in (mask, slopes, sinks)]
    with autocast("cpu", dtype=dtype):
        output = qkv.attention(Q, Q, Q, mask, alibi_slopes=slopes, sinks=sinks)
    q = Q.to(dtype)
    expected = qkv.attention(q, q, q, mask.to(dtype), alibi_slopes=slopes, sinks=sinks)
    assert torch.equal(output, expected)
    g = torch.randn_like(output)
    found, truth = (torch.autograd.grad(x, leaves, g) for x in (output, expected))
    for x, y in zip(found, truth, strict=True):
        assert x.dtype == torch.float32 and torch.equal(x, y)


@halves
@pytest.mark.filterwarnings("ignore:.*nested tensors.*", "ignore:.torch.jit:DeprecationWarning")
def test_jagged(dtype):
    values = torch.randn(20, 2, 8, requires_grad=True)
    offsets = torch.tensor([0, 5, 6, 20])

    def f(values):
        x = nested_tensor_from_jagged(values, offsets).transpose(1, 2)
        return qkv.attention(x, x, x, is_causal=True).values()

    torch.compiler.reset()
    with autocast("cpu", dtype=dtype):
        output = f(values)
        compiled = torch.compile(f, backend="aot_eager", fullgraph=True)(values)
    expected = f(values.to(dtype))
    assert torch.equal(compiled, output)
    assert output.dtype == dtype and torch.equal(output, expected)
    g = torch.randn_like(output)
    found, truth = (torch.autograd.grad(x, values, g)[0] for x in (output, expected))
    assert found.dtype == torch.float32
    assert_close([found.to(dtype)], [truth], dtype)  # of a sum of three halves


def train(attend, dtype, compiler=None):
    torch.manual_seed(0)
    model = torch.nn.Sequential(Block(attend), Block(attend))
    forward = torch.compile(model, backend=compiler, fullgraph=True) if compiler else model
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cpu", enabled=dtype == torch.float16)
    x, losses = torch.randn(2, 6, 16), []
    for _ in range(4):
        with autocast("cpu", dtype=dtype):
            loss = forward(x).float().square().mean()
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        assert all(p.grad.dtype == torch.float32 for p in model.parameters())
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    return losses


@halves
def test_training(dtype):
    """Training works as with torch's attention: f32 parameters, and for f16 a scaled loss."""
    ours = train(qkv.attention, dtype)
    assert ours == pytest.approx(train(F.scaled_dot_product_attention, dtype), rel=3e-3)
    assert ours[-1] < ours[0]


@halves
@pytest.mark.parametrize("compiler", COMPILERS)
@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
def test_compiled_training(dtype, compiler):
    torch.compiler.reset()
    compiled = train(qkv.attention, dtype, compiler)
    assert compiled == pytest.approx(train(qkv.attention, dtype), rel=3e-3)


@functions
@halves
@pytest.mark.parametrize("forward_inside", [False, True])
def test_the_backward_pass_under_autocast(name, dtype, forward_inside):
    """A backward pass under autocast, which torch advises against, gives the same numbers."""
    leaves = [x.requires_grad_() for x in make(torch.float32)]
    expected = run(FUNCTIONS[name], leaves, dtype if forward_inside else None)[1]
    torch.manual_seed(2)
    with autocast("cpu", dtype=dtype, enabled=forward_inside):
        loss = sum(x.float().sin().sum() for x in FUNCTIONS[name](*leaves))
    with autocast("cpu", dtype=dtype):
        found = torch.autograd.grad(loss, leaves, materialize_grads=True)
    for x, y in zip(found, expected, strict=True):
        assert torch.equal(x, y)
