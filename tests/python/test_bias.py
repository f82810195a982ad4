"""bias: a second floating mask, beside attn_mask. That it combines with every other option, in
every dtype and on every instruction set, the property tests say (strategies.py draws it)."""

import pytest
import torch

import qkv
from qkv import testing

INF, NAN = float("inf"), float("nan")


def problem(dtype=torch.float64, B=2, H=3, L=5, S=7, D=8):
    """query, key, value; a learned bias of all batch items, and a mask of the padding."""
    torch.manual_seed(0)
    query, key, value = (torch.randn(B, H, n, D, dtype=dtype) for n in (L, S, S))
    bias = torch.randn(1, H, L, S, dtype=dtype)
    padding = torch.arange(S) < torch.tensor([S, S - 3])[:, None, None, None]
    return query, key, value, bias, padding


def test_is_added_beside_a_mask():
    query, key, value, bias, padding = problem()
    one = bias.masked_fill(~padding, -INF)
    actual = qkv.attention(query, key, value, padding, bias=bias, return_lse=True)
    expected = qkv.attention(query, key, value, one, return_lse=True)
    torch.testing.assert_close(actual, expected, rtol=1e-13, atol=1e-13)


def test_alone_it_is_a_mask():
    query, key, value, bias, _ = problem()
    assert torch.equal(
        qkv.attention(query, key, value, bias=bias), qkv.attention(query, key, value, bias)
    )


@pytest.mark.parametrize("shape", [
    (2, 3, 5, 7), (1, 3, 5, 7), (2, 1, 5, 7), (5, 7), (3, 5, 7), (1, 3, 1, 7), (2, 1, 1, 7),
    (7,), (1, 3, 5, 1), (3, 1, 1), (1, 1), (),
])  # fmt: skip
def test_gradient_has_its_own_shape(shape):
    query, key, value, _, padding = problem()
    bias = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    sinks = torch.randn(3, dtype=torch.float64)  # a constant bias has a gradient, too, with them
    call = lambda bias: qkv.attention(query, key, value, padding, bias=bias, sinks=sinks)  # noqa: E731
    assert torch.autograd.gradcheck(call, bias)


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("floating", [False, True])
def test_both_gradients(dtype, floating):
    query, key, value, bias, padding = problem(dtype, L=40, S=70)
    mask = (
        torch.randn(2, 1, 1, 70, dtype=dtype).masked_fill(~padding, -INF) if floating else padding
    )
    leaves = [query, key, value, bias] + [mask] * floating
    for x in leaves:
        x.requires_grad_()
    grad = torch.randn(2, 3, 40, 8, dtype=dtype)
    output = qkv.attention(query, key, value, mask, bias=bias)
    actual = torch.autograd.grad(output, leaves, grad)
    wide = [x.detach().double().requires_grad_() for x in leaves]
    truth = testing.attention(*wide[:3], wide[4] if floating else mask, bias=wide[3])
    expected = torch.autograd.grad(truth, wide, grad.double())
    bound = {torch.float64: 1e-14, torch.float32: 4e-6, torch.float16: 3e-3}.get(dtype, 2e-2)
    for x, found, true in zip(leaves, actual, expected, strict=True):
        assert found.shape == x.shape and found.dtype == dtype
        visible = true != 0
        assert (found[~visible] == 0).all()
        error = (found.double() - true).abs().max() / true.abs().max()
        assert error <= bound, f"{error:.2g} of the largest"


@pytest.mark.bf16
def test_float32_beside_half():
    query, key, value, bias, padding = problem(torch.bfloat16)
    bias = bias.float().requires_grad_()
    qkv.attention(query, key, value, padding, bias=bias).sum().backward()
    assert bias.grad.dtype == torch.float32


@pytest.mark.bf16
def test_autocast_leaves_it_alone():
    query, key, value, bias, padding = problem(torch.float32)
    bias.requires_grad_()
    with torch.autocast("cpu"):
        output = qkv.attention(query, key, value, padding, bias=bias)
    assert output.dtype == torch.bfloat16
    halves = (x.bfloat16() for x in (query, key, value))
    assert torch.equal(output, qkv.attention(*halves, padding, bias=bias))


@pytest.mark.parametrize("other", [NAN, INF, -INF])
@pytest.mark.parametrize("hides", ["attn_mask", "bias"])
@pytest.mark.parametrize("boolean", [False, True])
def test_what_one_mask_hides_the_other_does_not_show(other, hides, boolean):
    query, key, value, bias, _ = problem()
    mask = torch.zeros(5, 7, dtype=torch.float64)
    hidden = torch.zeros(5, 7, dtype=torch.bool)
    hidden[:, 2:4] = True
    if hides == "attn_mask":
        mask, bias = mask.masked_fill(hidden, -INF), bias.masked_fill(hidden, other)
        mask = mask == 0 if boolean else mask
    elif boolean:
        pytest.skip("a boolean mask has no other numbers")
    else:
        mask, bias = mask.masked_fill(hidden, other), bias.masked_fill(hidden, -INF)
    actual = qkv.attention(query, key, value, mask, bias=bias)
    kept = [0, 1, 4, 5, 6]
    clean = bias.masked_fill(hidden, 0)[..., kept]
    expected = qkv.attention(query, key[..., kept, :], value[..., kept, :], bias=clean)
    torch.testing.assert_close(actual, expected, rtol=1e-13, atol=1e-13)


def test_weights_and_hard_attention():
    query, key, value, bias, padding = problem()
    one = bias.masked_fill(~padding, -INF)
    for f, more in ((qkv.attention_weights, ()), (qkv.hard_attention, (value,))):
        actual = f(query, key, *more, padding, bias=bias)
        torch.testing.assert_close(actual, f(query, key, *more, one), rtol=1e-13, atol=1e-13)
    leaf = bias.clone().requires_grad_()
    call = lambda b: qkv.attention_weights(query, key, padding, bias=b, reduce="queries")  # noqa: E731
    assert torch.autograd.gradcheck(call, leaf)
    soft, hard = (leaf.detach().requires_grad_() for _ in range(2))
    qkv.attention(query, key, value, padding, bias=soft).sum().backward()
    out = qkv.hard_attention(query, key, value, padding, bias=hard, straight_through=True)
    out.sum().backward()
    assert torch.equal(soft.grad, hard.grad)


def documents(dtype=torch.float64):
    """Three documents, one without queries, of 2 heads."""
    torch.manual_seed(1)
    lengths_q, lengths_k = [4, 0, 6], [5, 3, 9]
    query, key, value = (
        torch.randn(sum(n), 2, 8, dtype=dtype) for n in (lengths_q, *[lengths_k] * 2)
    )
    ends = [torch.tensor([0, *torch.tensor(n).cumsum(0).tolist()]) for n in (lengths_q, lengths_k)]
    return (query, key, value), (lengths_q, lengths_k), ends


@pytest.mark.parametrize("shape", [
    (3, 2, 6, 9), (1, 2, 6, 9), (2, 6, 9), (1, 1, 8, 11), (3, 1, 1, 9), (2, 1, 9), (3, 2, 6, 1),
    (1, 1, 6, 1), (6, 9), (2, 1, 1),
])  # fmt: skip
def test_documents_take_it_by_their_own_positions(shape):
    tensors, (lengths_q, lengths_k), (cu_q, cu_k) = documents()
    bias = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    sinks = torch.randn(2, dtype=torch.float64)
    packed = lambda bias: qkv.varlen_attn(  # noqa: E731
        *tensors, cu_q, cu_k, 6, 9, bias=bias, sinks=sinks
    )
    parts = []
    whole = bias.expand(3, 2, *bias.shape[-2:])
    for n, (L, S) in enumerate(zip(lengths_q, lengths_k, strict=True)):
        query = tensors[0][cu_q[n] : cu_q[n + 1]].transpose(0, 1)
        key, value = (x[cu_k[n] : cu_k[n + 1]].transpose(0, 1) for x in tensors[1:])
        own = whole[n][:, :L] if bias.size(-2) > 1 else whole[n]
        own = own[..., :S] if bias.size(-1) > 1 else own
        parts.append(qkv.attention(query, key, value, bias=own, sinks=sinks).transpose(0, 1))
    torch.testing.assert_close(packed(bias), torch.cat(parts), rtol=1e-13, atol=1e-13)
    assert torch.autograd.gradcheck(packed, bias)


@pytest.mark.parametrize(
    ("lengths", "heads", "shape"),
    [
        ([8] * 40, (6, 3), (1, 6, 8, 8)),
        ([8] * 40, (6, 6), (1, 1, 8, 8)),
        ([3, 0, 700, 12], (4, 2), (1, 4, 700, 700)),
        ([600, 513], (1, 1), (600, 600)),
        ([300, 290, 4], (2, 2), (1, 1, 300)),
    ],
)
def test_documents_that_share_it(lengths, heads, shape, threads):
    """Its gradient is the sum over the documents, with the same bits for any number of threads."""
    torch.manual_seed(7)
    rows, longest = sum(lengths), max(lengths)
    query = torch.randn(rows, heads[0], 16, requires_grad=True)
    key, value = (torch.randn(rows, heads[1], 16, requires_grad=True) for _ in range(2))
    cu = torch.tensor([0, *lengths]).cumsum(0)
    bias, seed = torch.randn(shape, requires_grad=True), torch.randn(rows, heads[0], 16)

    def gradients(bias, *also):
        output = qkv.varlen_attn(
            query, key, value, cu, cu, longest, longest, bias=bias, enable_gqa=True
        )
        return torch.autograd.grad(output, (query, key, value, *also), seed)

    threads(1)
    expected = gradients(bias, bias)
    for count in (2, 3, 4):
        threads(count)
        for mine, its in zip(gradients(bias, bias), expected, strict=True):
            assert torch.equal(mine, its)
    each = bias.detach().expand(len(lengths), *[1] * (3 - len(shape)), *shape[-3:]).clone()
    *others, each_grad = gradients(each.requires_grad_(), each)
    for mine, its in zip(expected, others, strict=False):
        torch.testing.assert_close(mine, its)
    torch.testing.assert_close(expected[-1], each_grad.double().sum(0).float().view(shape))


@pytest.mark.parametrize("holes", [False, True])
def test_jagged(holes):
    torch.manual_seed(2)
    lengths = torch.tensor([3, 5]) if holes else None
    offsets = torch.tensor([0, 4, 9])
    jagged = [
        torch.nested.nested_tensor_from_jagged(torch.randn(9, 2, 8), offsets, lengths).transpose(
            1, 2
        )
        for _ in range(3)
    ]
    bias = torch.randn(2, 2, 5, 5)
    output = qkv.attention(*jagged, bias=bias)
    for b, n in enumerate([3, 5] if holes else [4, 5]):
        rows = slice(offsets[b], offsets[b] + n)  # of the values, [H, 9, D]
        inputs = (x.values()[:, rows] for x in jagged)
        expected = qkv.attention(*inputs, bias=bias[b, :, :n, :n])
        torch.testing.assert_close(output.values()[:, rows], expected)


@pytest.mark.parametrize("paged", [False, True])
def test_cache(paged):
    torch.manual_seed(3)
    query = torch.randn(2, 4, 3, 8)
    cache = torch.randn(2, 2, 2, 12, 8)
    lengths = torch.tensor([6, 9])
    bias = torch.randn(2, 4, 3, 10)
    table = {}
    k_cache, v_cache = cache
    if paged:  # blocks of 4 rows, in another order
        k_cache, v_cache = (
            x.unflatten(2, (3, 4)).transpose(1, 2).flatten(0, 1).flip(0).contiguous() for x in cache
        )
        table = {"block_table": torch.tensor([[5, 4, 3], [2, 1, 0]])}
    output = qkv.attention_with_kvcache(
        query, k_cache, v_cache, cache_seqlens=lengths, bias=bias, **table
    )
    for b, n in enumerate(lengths.tolist()):
        expected = qkv.attention(
            query[b], *cache[:, b, :, :n], bias=bias[b, :, :, :n], enable_gqa=True
        )
        torch.testing.assert_close(output[b], expected)


def test_paged_documents():
    torch.manual_seed(4)
    query, pool = torch.randn(5, 2, 8), torch.randn(2, 4, 3, 2, 8)
    cu_q, used = torch.tensor([0, 2, 5]), torch.tensor([4, 6])
    table, bias = torch.tensor([[1, 3], [0, 2]]), torch.randn(2, 3, 6)
    output = qkv.varlen_attn(
        query, *pool, cu_q, None, 3, 6, seqused_k=used, block_table=table, bias=bias
    )
    for n, S in enumerate(used.tolist()):
        key, value = (x[table[n]].flatten(0, 1)[:S].transpose(0, 1) for x in pool)
        own = query[cu_q[n] : cu_q[n + 1]].transpose(0, 1)
        expected = qkv.attention(own, key, value, bias=bias[:, : own.size(1), :S])
        torch.testing.assert_close(output[cu_q[n] : cu_q[n + 1]].transpose(0, 1), expected)


def test_transforms():
    query, key, value, bias, padding = problem(B=2)
    bias = bias[0]

    def loss(bias, query, key, value, padding):
        return qkv.attention(query, key, value, padding, bias=bias).square().sum()

    each = torch.func.vmap(torch.func.grad(loss), (None, 0, 0, 0, 0))
    actual = each(bias, query, key, value, padding)
    expected = [
        torch.func.grad(loss)(bias, *x) for x in zip(query, key, value, padding, strict=True)
    ]
    torch.testing.assert_close(actual, torch.stack(expected))
    many = torch.randn(4, 3, 5, 7, dtype=torch.float64)
    actual = torch.func.vmap(loss, (0, None, None, None, None))(many, query, key, value, padding)
    expected = [loss(b, query, key, value, padding) for b in many]
    torch.testing.assert_close(actual, torch.stack(expected))

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    leaves = [bias.clone().requires_grad_() for _ in range(2)]
    for f, leaf in zip((loss, compiled), leaves, strict=True):
        f(leaf, query, key, value, padding).backward()
    torch.testing.assert_close(leaves[0].grad, leaves[1].grad)


@pytest.mark.parametrize(("change", "message"), [
    ({"bias": torch.zeros(5, 7, dtype=torch.bool)}, "bias is bool, but float32 or query's dtype"),
    ({"bias": torch.zeros(5, 7, dtype=torch.float16)}, "bias is float16, but float32 or query's"),
    ({"bias": torch.zeros(5, 6)}, r"bias has the shape \[5, 6\], which does not broadcast"),
    ({"bias": torch.zeros(5, 7, device="meta")}, "bias is on meta, but query is on cpu"),
])  # fmt: skip
def test_bad_call(change, message):
    query, key, value, _, padding = problem()
    with pytest.raises(RuntimeError, match=message):
        qkv.attention(query, key, value, padding, **change)


def test_too_small_for_a_document_or_a_row_of_a_cache():
    tensors, _, (cu_q, cu_k) = documents()
    with pytest.raises(
        RuntimeError, match=r"bias has .*\[6, 8\], but document 2 has 6 .* and 9 keys"
    ):
        qkv.varlen_attn(*tensors, cu_q, cu_k, 6, 9, bias=torch.zeros(6, 8))
    cache = torch.randn(2, 2, 2, 12, 8)
    with pytest.raises(
        RuntimeError, match=r"bias has .*\[1, 11\], but batch item 0 has 1 .* 12 keys"
    ):
        qkv.attention_with_kvcache(torch.randn(2, 2, 1, 8), *cache, bias=torch.zeros(1, 11))
