"""qkv.merge: attention over parts of the keys is attention over all of them."""

import pytest
import torch
from common import COMPILERS, INF, TOLERANCES, dtypes_of
from torch.autograd import gradcheck, gradgradcheck
from torch.nn.attention.varlen import AuxRequest

import qkv

B, H, L, S, D, DV = 2, 3, 5, 12, 8, 6
CUTS = [(0, 5), (5, 6), (6, 12)]


def inputs(dtype=torch.float64, requires_grad=False):
    torch.manual_seed(0)
    shapes = (B, H, L, D), (B, H, S, D), (B, H, S, DV)
    return [torch.randn(s, dtype=dtype).requires_grad_(requires_grad) for s in shapes]


def in_parts(query, key, value, mask=None):
    """Attention to each of CUTS, which are ranges of keys, merged."""
    parts = [
        qkv.attention(
            query, key[..., begin:end, :], value[..., begin:end, :],
            None if mask is None else mask[..., begin:end], return_lse=True,
        )
        for begin, end in CUTS
    ]  # fmt: skip
    return qkv.merge(*zip(*parts, strict=True))


def parts_of(n, shape=(2, 4, 3), dtype=torch.float64, requires_grad=True):
    torch.manual_seed(1)
    outputs = [torch.randn(shape, dtype=dtype).requires_grad_(requires_grad) for _ in range(n)]
    lses = [torch.randn(shape[:-1], dtype=dtype).requires_grad_(requires_grad) for _ in range(n)]
    return outputs, lses


@dtypes_of("f32", "f64", "bf16", "f16")
def test_all_keys(dtype):
    query, key, value = inputs(dtype)
    output, lse = in_parts(query, key, value)
    expected, expected_lse = qkv.attention(query, key, value, return_lse=True)
    assert output.dtype == expected.dtype and lse.dtype == expected_lse.dtype
    torch.testing.assert_close(output, expected, rtol=0, atol=TOLERANCES[dtype])
    torch.testing.assert_close(lse, expected_lse, rtol=0, atol=1e-5)


def test_gradients_of_all_keys():
    tensors = inputs(requires_grad=True)
    torch.manual_seed(2)
    grads = torch.randn(B, H, L, DV, dtype=torch.float64), torch.randn(B, H, L, dtype=torch.float64)
    found = torch.autograd.grad(in_parts(*tensors), tensors, grads)
    expected = torch.autograd.grad(qkv.attention(*tensors, return_lse=True), tensors, grads)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


def test_rows_that_see_no_key():
    """Some rows see no key of a part, and the first rows no key of any part."""
    tensors = inputs(requires_grad=True)
    mask = torch.zeros(L, S, dtype=torch.bool)
    mask[1, :5] = mask[2, 5] = mask[3, 6:] = mask[4] = True
    output, lse = in_parts(*tensors, mask)
    expected, expected_lse = qkv.attention(*tensors, mask, return_lse=True)
    torch.testing.assert_close(output, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(lse, expected_lse, rtol=0, atol=1e-12)
    assert (output[:, :, 0] == 0).all() and (lse[:, :, 0] == -INF).all()

    grad = torch.ones_like(output)
    found = torch.autograd.grad(output, tensors, grad)
    for ours, theirs in zip(found, torch.autograd.grad(expected, tensors, grad), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


@pytest.mark.parametrize("n", [1, 2, 4])
def test_derivatives(n):
    outputs, lses = parts_of(n)
    f = lambda *tensors: qkv.merge(tensors[:n], tensors[n:])  # noqa: E731
    assert gradcheck(f, (*outputs, *lses), check_forward_ad=True, check_batched_grad=True)
    assert gradgradcheck(f, (*outputs, *lses), check_fwd_over_rev=True)


def test_large_scores():
    """Only differences of lse count, so nothing overflows."""
    outputs, lses = parts_of(3, requires_grad=False)
    output, lse = qkv.merge(outputs, lses)
    for shift in (-1e4, 1e4):
        far, far_lse = qkv.merge(outputs, [x + shift for x in lses])
        torch.testing.assert_close(far, output, rtol=0, atol=1e-10)
        torch.testing.assert_close(far_lse - shift, lse, rtol=0, atol=1e-10)


def test_nan_of_one_row():
    outputs, lses = parts_of(2, requires_grad=False)
    expected, _ = qkv.merge(outputs, lses)
    lses[0][0, 1] = float("nan")
    output, lse = qkv.merge(outputs, lses)
    assert output[0, 1].isnan().all() and lse[0, 1].isnan()
    others = torch.ones(2, 4, dtype=torch.bool)
    others[0, 1] = False
    assert torch.equal(output[others], expected[others])


@pytest.mark.parametrize("backend", COMPILERS)
def test_compile(backend):
    outputs, lses = parts_of(3, dtype=torch.float32)
    f = lambda outputs, lses: qkv.merge(outputs, lses)[0].sin().sum()  # noqa: E731
    compiled = torch.compile(f, backend=backend, fullgraph=True)
    found = torch.autograd.grad(compiled(outputs, lses), (*outputs, *lses))
    expected = torch.autograd.grad(f(outputs, lses), (*outputs, *lses))
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_vmap():
    outputs, lses = parts_of(2, requires_grad=False)
    found = torch.vmap(lambda o, m: qkv.merge(o, m), in_dims=([0, 0], [0, 0]))(outputs, lses)
    for ours, theirs in zip(found, qkv.merge(outputs, lses), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_meta():
    outputs, lses = parts_of(2, requires_grad=False)
    output, lse = qkv.merge([x.to("meta") for x in outputs], [x.to("meta") for x in lses])
    assert output.device.type == "meta" and output.shape == (2, 4, 3) and lse.shape == (2, 4)


def test_packed_documents():
    """Parts of packed documents are merged: the lse of varlen_attn is [H, T]."""
    torch.manual_seed(3)
    packed = torch.randn(7, H, D)
    cu_seq = torch.tensor([0, 3, 7])
    call = (packed, packed, packed, cu_seq, None, 4, 4)
    output, lse = qkv.varlen_attn(*call, return_aux=AuxRequest(lse=True))
    merged, merged_lse = qkv.merge([output, output], [lse.T, lse.T])
    torch.testing.assert_close(merged, output)
    torch.testing.assert_close(merged_lse, lse.T + torch.tensor(2.0).log())


A, ROWS = torch.zeros(2, 3), torch.zeros(2)


@pytest.mark.parametrize(
    "outputs, lses, message",
    [
        ([], [], "outputs is empty; at least one part is expected"),
        ([A, A], [ROWS], r"lses has 1 tensors, but 2 are expected"),
        ([A, A.double()], [ROWS, ROWS], r"outputs\[1\] is Double, but one floating"),
        ([A.int()], [ROWS], r"outputs\[0\] is Int, but one floating dtype"),
        ([A, A], [ROWS, ROWS.double()], r"lses\[1\] is Double, but one floating"),
        ([A, A[:1]], [ROWS, ROWS], r"outputs\[1\] is \[1, 3\], but one shape"),
        ([A[0, 0]], [A[0, 0]], r"outputs\[0\] is \[\], but one shape"),
        ([A], [A], r"lses\[0\] is \[2, 3\], but \[2\] is expected"),
    ],
)
def test_errors(outputs, lses, message):
    with pytest.raises(RuntimeError, match="merge: " + message):
        qkv.merge(outputs, lses)
