"""Tensors of more than 2^31 elements, and strides as long: every offset is counted in 64 bits.

Most of the memory is never touched: it is the kernel's page of zeros, or one slice again and again.
What has to be written is said by `needs`.
"""

import mmap

import pytest
import torch
from common import INF, attend

import qkv

pytestmark = pytest.mark.long

HUGE = 2**31 + 256
MAP_NORESERVE = 0x4000  # Linux; Python has a name for it from 3.12 on


def needs(gigabytes):
    with open("/proc/meminfo") as file:
        lines = dict(line.split(":") for line in file)
    free = int(lines["MemAvailable"].split()[0]) / 2**20
    if free < gigabytes + 1:
        pytest.skip(f"needs {gigabytes} GB of memory, and {free:.0f} are free")


def untouched(elements, dtype):
    """Zeros, however many, that take no memory until they are written to."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
    return torch.frombuffer(mmap.mmap(-1, elements * dtype.itemsize, flags=flags), dtype=dtype)


def far_apart(x, dim):
    """x's values in a tensor with more than 2^31 elements between the first and the last along
    `dim`."""
    strides = list(x.contiguous().stride())
    strides[dim] = 2**31 // (x.size(dim) - 1) + 64
    span = 1 + sum((n - 1) * s for n, s in zip(x.shape, strides, strict=True))
    return untouched(span, x.dtype).as_strided(x.shape, strides).copy_(x)


def everything(call, **options):
    """Output, lse and all gradients."""
    leaves = {n: x.detach().requires_grad_() for n, x in call.items() if x.is_floating_point()}
    results = torch.ops.qkv.attention_with_lse(**{**call, **leaves}, **options)
    torch.manual_seed(1)
    seeds = [torch.randn(x.shape).to(x.dtype) for x in results]
    return [*results, *torch.autograd.grad(results, leaves.values(), seeds)]


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("L", [3, 20])  # few rows go another way
class TestStrides:
    @pytest.mark.parametrize("dim", [0, 1, 2])
    @pytest.mark.parametrize("name", ["query", "key", "value", "attn_mask"])
    def test_far_apart(self, name, dim, L, dtype):
        """Batch items, heads or rows that lie far apart give the same bits as side by side."""
        call = {
            "query": torch.randn(2, 2, L, 8), "key": torch.randn(2, 2, 5, 8),
            "value": torch.randn(2, 2, 5, 8), "attn_mask": torch.randn(2, 2, L, 5),
        }  # fmt: skip
        call = {n: x.to(dtype) for n, x in call.items()}
        expected = everything(call)
        call[name] = far_apart(call[name], dim)
        for x, y in zip(everything(call), expected, strict=True):
            assert torch.equal(x, y)

    def test_gradient_of_the_output(self, L, dtype):
        query, key, value = torch.randn(3, 1, 2, L, 8).to(dtype)
        leaves = [x.requires_grad_() for x in (query, key, value)]
        output = qkv.attention(*leaves)
        g = torch.randn(output.shape).to(dtype)
        expected = torch.autograd.grad(output, leaves, g, retain_graph=True)
        for x, y in zip(
            torch.autograd.grad(output, leaves, far_apart(g, 1)), expected, strict=True
        ):
            assert torch.equal(x, y)


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
class TestManyKeys:
    """A window at the end of 2^31 keys and more; what lies before takes no memory and no time."""

    def make(self, dtype, L=4, D=1, S=HUGE, last=8):
        """query, key and value of zeros, but for the last keys and values."""
        key, value = (untouched(S * D, dtype).view(1, 1, S, D) for _ in range(2))
        for x in (key, value):
            x[..., -last:, :] = torch.randn(last, D).to(dtype)
        return torch.randn(1, 1, L, D).to(dtype), key, value

    @pytest.mark.parametrize("L", [4, 40])
    def test_forward(self, L, dtype):
        query, key, value = self.make(dtype, L, last=64)
        options = {"window_size": (3, 0)}
        output, lse = torch.ops.qkv.attention_with_lse(query, key, value, **options)
        end = slice(-L - 3, None)
        expected = attend(query, key[..., end, :], value[..., end, :], **options)
        tolerance = 8 * torch.finfo(dtype).eps
        torch.testing.assert_close(output, expected[0], rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(lse, expected[1], rtol=1e-5, atol=1e-5)

    def test_backward(self, dtype):
        """The backward pass for keys of 256 numbers each, which together have more than 2^31."""
        needs(2 * HUGE / 2**30)  # the gradient of the keys
        query, key, _ = self.make(dtype, D=256, S=HUGE // 256)
        value = torch.randn(1).to(dtype).expand(*key.shape[:-1], 1)
        options = {"window_size": (3, 0)}
        leaves = [x.requires_grad_() for x in (query, key, value)]
        output = qkv.attention(*leaves, **options)
        g = torch.randn(output.shape).to(dtype)
        found = list(torch.autograd.grad(output, leaves, g))
        ends = [x.detach()[..., -7:, :].requires_grad_() for x in leaves]
        expected = torch.autograd.grad(attend(*ends, **options)[0], ends, g)
        assert not found[1][..., :-7, :].any() and not found[2][..., :-7, :].any()
        found[1:] = (x[..., -7:, :] for x in found[1:])
        tolerance = 16 * torch.finfo(dtype).eps
        for x, y in zip(found, expected, strict=True):
            torch.testing.assert_close(x, y, rtol=tolerance, atol=tolerance)

    def test_the_best_key(self, dtype):
        """The number of the best key has more than 32 bits."""
        query, key, value = self.make(dtype, D=8)
        key[..., -1, :] = 100 * query[0, 0, -1]
        output, index = qkv.hard_attention(query, key, value, window_size=(3, 0), return_index=True)
        assert index[0, 0, -1] == HUGE - 1
        assert ((index >= HUGE - 7) & (index < HUGE)).all()
        assert torch.equal(output[0, 0, -1], value[0, 0, -1])


class TestManyWeights:
    """Weights of 46400 queries and as many keys, which are more than 2^31."""

    N = 46400

    def test_attention_weights(self):
        needs(2 * 2**32 / 2**30)
        query, key = (torch.randn(self.N, 1).half() for _ in range(2))
        weights = qkv.attention_weights(query, key)
        assert weights.numel() > 2**31
        for i in (0, 1, self.N // 2, self.N - 1):
            expected = (query[i].double() * key[:, 0].double()).softmax(-1)
            torch.testing.assert_close(weights[i].double(), expected, rtol=2e-3, atol=1e-7)

    @pytest.mark.bf16
    def test_gradient_of_a_mask(self):
        """A mask in which each row sees a few keys: its gradient is 0 elsewhere."""
        needs(2 * 2**32 / 2**30)
        query, key, value = (torch.randn(self.N, 1).bfloat16() for _ in range(3))
        mask = untouched(self.N**2, torch.bfloat16).view(self.N, self.N).requires_grad_()
        output = qkv.attention(query, key, value, mask, window_size=(3, 0))
        g = torch.randn(output.shape).bfloat16()
        (found,) = torch.autograd.grad(output, mask, g)
        rows = slice(-200, None)
        own = torch.zeros(200, 203, requires_grad=True)
        narrow = [x[-n:].float() for x, n in ((query, 200), (key, 203), (value, 203))]
        expected = attend(*narrow, own, window_size=(3, 0))[0]
        (truth,) = torch.autograd.grad(expected, own, g[rows].float())
        torch.testing.assert_close(found[rows, -203:].float(), truth, rtol=5e-2, atol=2e-2)
        assert not found[rows, :-203].any()
        assert found[rows, -203:].any(-1).all()


def test_a_mask_hides_far_keys():
    """A boolean mask of 2^31 + 256 columns, one row for all queries, that shows the last five."""
    key = untouched(HUGE, torch.float16).view(1, 1, HUGE, 1)
    key[..., -8:, :] = 1
    mask = untouched(HUGE, torch.uint8).view(torch.bool)
    mask[-5:] = True
    query = torch.randn(1, 1, 2, 1).half()
    output, lse = torch.ops.qkv.attention_with_lse(
        query, key, key, mask.expand(2, -1), window_size=(2**20, 0)
    )
    assert torch.equal(output, torch.ones_like(output)) and (lse > -INF).all()
