"""Memory grows with the length of the sequences, not its square, and no keys are copied."""

import pytest
from common import run_python
from forks import run_forked

MEASURE = """
import warnings
warnings.simplefilter("ignore")  # torch's, of its own torch.jit, would stand between the figures
import torch, qkv
from torch.nn.functional import scaled_dot_product_attention
attention = {attention}
torch.set_num_threads(4)

def peak():
    for line in open("/proc/self/status"):
        if line.startswith("VmHWM"):
            return int(line.split()[1]) / 1024

def growth(f):
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # the peak restarts from what is resident now
    before = peak()
    f()
    return peak() - before

def train(L, D=64, dtype=torch.float32, **options):
    x = [torch.randn(1, 1, L, D, dtype=dtype, requires_grad=True) for _ in range(3)]
    return growth(lambda: attention(*x, **options).sum().backward())

train(64)  # libraries and thread stacks
"""


def megabytes(code, attention="torch.ops.qkv.attention", run=run_forked):
    return [float(x) for x in run(MEASURE.format(attention=attention) + code, 300).split()]


def dtypes(*names):
    return pytest.mark.parametrize("dtype", names)


@dtypes("float32", "bfloat16")
def test_no_more_than_torch(dtype):
    code = f"print(train(4096, is_causal=True, dtype=torch.{dtype}))"
    (ours,) = megabytes(code)
    (theirs,) = megabytes(code, "scaled_dot_product_attention")
    assert ours <= theirs + 32  # the scores alone would take 64


@pytest.mark.one_in(2)
@dtypes("float32", "float16")
def test_very_long_head(dtype):
    """Against what torch cannot do without either, where torch itself takes minutes: the output
    and the three gradients."""
    (ours,) = megabytes(f"print(train(32768, is_causal=True, dtype=torch.{dtype}))")
    size = 4 if dtype == "float32" else 2
    assert ours <= 4 * 32768 * 64 * size / 2**20 + 64


def test_growth_is_linear():
    small, large = megabytes("print(train(4096), train(16384))")
    assert large <= 4 * small + 16


@pytest.mark.parametrize("options", [
    "dropout_p=0.1", "softcap=30.0, window_size=(100, 100)",
    "alibi_slopes=torch.rand(1, requires_grad=True), sinks=torch.rand(1, requires_grad=True)",
    "attn_mask=torch.randn(L, requires_grad=True)",
    "attn_mask=torch.randn(L, 1, requires_grad=True), dropout_p=0.1, softcap=30.0",
    "attn_mask=torch.randn(L, requires_grad=True), dropout_p=0.1, dtype=torch.bfloat16",
])  # fmt: skip
def test_growth_is_linear_with_options(options):
    """The scores alone would take 256 MB, whatever the options."""
    (ours,) = megabytes(f"L = 8192; print(train(L, {options}))")
    assert ours <= 48


@pytest.mark.parametrize("options", [
    "spans=qkv.Spans.chunks(256, L).tensor",
    "attn_mask=torch.ones(L, 1, dtype=torch.bool), window_size=(99, 0)",
    "spans=torch.tensor([[0, L]], dtype=torch.int32).repeat(L, 1), window_size=(99, 0)",
])  # fmt: skip
def test_maps_of_masks_hold_what_may_be_seen(options):
    """Of all pairs of 400,000 tokens, a map would take 450 MB."""
    (found,) = megabytes(f"L = 400_000; print(train(L, D=8, {options}))")
    assert found < 250


SECOND = """
def second(L, D=64, **options):
    x = [torch.randn(1, 1, L, D, requires_grad=True) for _ in range(3)]
    directions = tuple(torch.randn(1, 1, L, D) for _ in x)
    f = lambda *x: attention(*x, **options)

    def twice():
        gradients = torch.autograd.grad(f(*x).sum(), x, create_graph=True)
        torch.autograd.grad(gradients, x, directions)

    return growth(lambda: torch.func.jvp(f, tuple(x), directions)), growth(twice)

second(64)
"""


@pytest.mark.parametrize("options", [
    "", "is_causal=True", "softcap=30.0, window_size=(100, 100), dropout_p=0.1",
    "attn_mask=torch.randn(L, requires_grad=True), sinks=torch.rand(1, requires_grad=True)",
])  # fmt: skip
def test_no_scores_in_forward_mode_and_second_order(options):
    """The scores alone would take 64 MB."""
    forward_mode, twice = megabytes(SECOND + f"L = 4096; print(*second(L, {options}))")
    assert forward_mode <= 32 and twice <= 32


@pytest.mark.long
def test_second_order_of_a_long_head():
    """The scores alone would take 1024 MB; the results of the four passes are eight tensors of
    4 MB."""
    forward_mode, twice = megabytes(SECOND + "print(*second(16384))")
    assert forward_mode <= 64 and twice <= 96


@pytest.mark.parametrize("shape", ["1, 1, n, n", "1, 8, n, n", "8, 1, 1, n", "8, n, 1", ""])
def test_mask_gradient_needs_no_temporary_larger_than_itself(shape):
    """All scores would be 64 matrices of 4 MB. Beyond the gradients, the backward pass takes no
    more memory than the mask's gradient has."""
    code = f"""
def mask_gradient(n):
    x = [torch.randn(8, 8, n, 16, requires_grad=True) for _ in range(3)]
    mask = torch.zeros(({shape})).requires_grad_()
    output = attention(*x, mask)
    g = torch.ones_like(output)
    return growth(lambda: torch.autograd.grad(output, [*x, mask], g)), mask.numel() * 4 / 2**20

mask_gradient(64)
print(*mask_gradient(1024))
"""
    ours, gradient = megabytes(code)
    assert ours <= 2 * gradient + 3 * 4 + 16  # three more gradients; each thread's workspace


@pytest.mark.parametrize("reduce", ["heads", "queries"])
def test_reduced_weights_never_hold_all(reduce):
    """All weights would take 256 MB; the reduced ones take 16 MB, and their gradient as much."""
    code = f"""
def weights(n):
    x = [torch.randn(1, 16, n, 16, requires_grad=True) for _ in range(2)]

    def run():
        weights = qkv.attention_weights(*x, reduce="{reduce}")
        torch.autograd.grad(weights, x, torch.ones_like(weights))

    return growth(run)

weights(64)
print(weights(2048))
"""
    (ours,) = megabytes(code)
    assert ours < 80


def test_packed_documents_are_not_padded():
    """One long document and many short ones: padded, the values alone would take 256 MB."""
    code = """
ends = torch.tensor([0, 8192, *range(8200, 8200 + 8 * 127, 8), 8200 + 8 * 127])
x = [torch.randn(int(ends[-1]), 1, 64, requires_grad=True) for _ in range(3)]
print(growth(lambda: qkv.varlen_attn(*x, ends, None, 8192, 8192).sum().backward()))
"""
    (ours,) = megabytes(code)
    assert ours <= 5 * 9216 * 64 * 4 / 2**20 + 32


@pytest.mark.parametrize("layout", ["x", "x.mT.contiguous().mT", "x.repeat(1, 1, 1, 2)[..., ::2]"])
@dtypes("float32", "bfloat16")
def test_keys_and_values_are_not_copied(layout, dtype):
    """A few queries on 64 MB each of keys and values, dense or strided: nor widened to f32, but in
    blocks that stay in the cache."""
    length = 16384 if dtype == "float32" else 32768
    code = f"""
x = torch.randn(1, 8, {length}, 128).to(torch.{dtype})
x = {layout}
for L in (4, 64):
    q = torch.randn(1, 8, L, 128, dtype=x.dtype)
    with torch.no_grad():
        print(growth(lambda: attention(q, x, x)))
"""
    few, more = megabytes(code)
    assert few < 16 and more < 16


@dtypes("float32", "bfloat16", "float16")
def test_gradients_of_keys_and_values_are_not_copied(dtype):
    """Keys and values have 64 MB each. Their gradients take as much, and there are no sums of all
    of them in f32 beside those."""
    length = 16384 if dtype == "float32" else 32768
    code = f"""
x = [torch.randn(1, 8, n, 128).to(torch.{dtype}).requires_grad_() for n in (64, {length})]
output = attention(x[0], x[1], x[1])
g = torch.ones_like(output)
print(growth(lambda: torch.ops.qkv.attention_backward(
    g, None, x[0], x[1], x[1], *[None] * 9, output, torch.zeros(1, 8, 64), dropout_p=0.0,
    is_causal=False, scale=None, enable_gqa=False, window_size=None, softcap=0.0,
    output_mask=[True] * 3 + [False] * 5,
)))
"""
    (ours,) = megabytes(code)
    assert ours < 2 * 64 + 48


def test_gradients_on_many_threads():
    """What 64 threads take beside the gradients themselves, of base, long, long1h and llama."""
    code = """
import ctypes
torch.set_num_threads(64)

def beyond(heads, kv_heads, length, dim, is_causal):
    x = [torch.randn(1, n, length, dim).requires_grad_() for n in (heads, kv_heads, kv_heads)]
    output = attention(*x, is_causal=is_causal, enable_gqa=True)
    ones = torch.ones_like(output)
    ctypes.CDLL(None).malloc_trim(0)  # what was freed is not resident, so that it counts again
    grown = growth(lambda: torch.autograd.grad(output, x, ones))
    return grown - sum(t.nbytes for t in x) / 2**20

beyond(8, 8, 2048, 64, False)  # the stacks of the threads, and what torch imports at its first call
print(beyond(8, 8, 1024, 64, False))
print(beyond(8, 8, 4096, 64, True))
print(beyond(1, 1, 4096, 64, False))
print(beyond(32, 8, 1024, 128, True))
"""
    found = megabytes(code, run=run_python)
    assert len(found) == 4 and all(0 < beyond <= 32 for beyond in found)
