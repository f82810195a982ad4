"""qkv.compat: functions of flash_attn and xformers, against softmax written out in float64."""

import inspect
import math

import pytest
import torch
from torch.testing import assert_close

from qkv.compat import flash_attn, xformers

# How flash_attn 2.8 and xformers declare them.
ATTENTION = (
    "dropout_p=0.0 softmax_scale=None causal=False window_size=(-1,-1) softcap=0.0 "
    "alibi_slopes=None deterministic=False return_attn_probs=False"
)
SIGNATURES = {
    flash_attn.flash_attn_func: f"q k v {ATTENTION}",
    flash_attn.flash_attn_varlen_func: "q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k "
    f"{ATTENTION} block_table=None",
    flash_attn.flash_attn_with_kvcache: "q k_cache v_cache k=None v=None rotary_cos=None "
    "rotary_sin=None cache_seqlens=None cache_batch_idx=None cache_leftpad=None block_table=None "
    "softmax_scale=None causal=False window_size=(-1,-1) softcap=0.0 rotary_interleaved=True "
    "alibi_slopes=None num_splits=0 return_softmax_lse=False",
    xformers.memory_efficient_attention: "query key value attn_bias=None p=0.0 scale=None op=None "
    "output_dtype=None",
}


@pytest.mark.parametrize("function", SIGNATURES, ids=lambda f: f.__name__)
def test_signature(function):
    found = [
        p.name if p.default is p.empty else f"{p.name}={p.default}".replace(" ", "")
        for p in inspect.signature(function).parameters.values()
    ]
    assert found == SIGNATURES[function].split()


def reference(q, k, v, scale=None, causal=False, window=(-1, -1), softcap=0.0, slopes=None):
    """flash_attn's attention of rows before heads, and its lse, `[B, H, L]`, in float64. slopes:
    `[H]` or `[B, H]`."""
    queries, keys, heads = q.size(1), k.size(1), q.size(2)
    k, v = (x.repeat_interleave(heads // x.size(2), 2).double() for x in (k, v))
    scores = torch.einsum("bihd,bjhd->bhij", q.double(), k) * (scale or q.size(-1) ** -0.5)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    behind = torch.arange(queries)[:, None] + keys - queries - torch.arange(keys)
    if slopes is not None:
        slopes = slopes.double().expand(q.size(0), heads)
        scores = scores - slopes[..., None, None] * behind.abs()
    hidden = (behind < 0) & bool(causal)
    if window[0] >= 0:
        hidden |= behind > window[0]
    if window[1] >= 0:
        hidden |= -behind > window[1]
    scores = scores.masked_fill(hidden, -math.inf)
    lse = scores.logsumexp(-1)
    weights = torch.where(lse.isinf()[..., None], 0, scores - lse[..., None]).exp()
    weights = weights.masked_fill(hidden, 0)
    return torch.einsum("bhij,bjhd->bihd", weights, v), lse


def close(found, expected):
    atol, rtol = (1e-5, 1e-4) if found.dtype == torch.float32 else (2e-2, 2e-2)
    assert_close(found.double(), expected, atol=atol, rtol=rtol)


def tensors(*shapes, dtype=torch.float32):
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


class TestFlashAttn:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("window", [(-1, -1), (3, -1), (2, 4)])
    @pytest.mark.parametrize("causal", [False, True])
    @pytest.mark.parametrize("lengths", [(5, 9), (9, 5), (16, 16)])
    def test_against_a_reference(self, lengths, causal, window, dtype):
        q, k, v = tensors((2, lengths[0], 4, 8), *[(2, lengths[1], 2, 8)] * 2, dtype=dtype)
        slopes = torch.rand(2, 4)
        output, lse, probs = flash_attn.flash_attn_func(
            q, k, v, softmax_scale=0.3, causal=causal, window_size=window, softcap=5.0,
            alibi_slopes=slopes, return_attn_probs=True,
        )  # fmt: skip
        expected, expected_lse = reference(q, k, v, 0.3, causal, window, 5.0, slopes)
        assert probs is None
        close(output, expected)
        close(lse, expected_lse)
        grad = torch.randn_like(output)
        found = torch.autograd.grad(output, (q, k, v), grad)
        for x, y in zip(
            found, torch.autograd.grad(expected, (q, k, v), grad.double()), strict=True
        ):
            close(x, y.double())

    def test_packed_together(self):
        qkv = torch.randn(2, 6, 3, 4, 8)
        expected = flash_attn.flash_attn_func(*qkv.unbind(2), 0.0, None, True)
        assert torch.equal(flash_attn.flash_attn_qkvpacked_func(qkv, 0.0, None, True), expected)
        q, kv = qkv[:, :, 0], qkv[:, :, 1:]
        assert torch.equal(flash_attn.flash_attn_kvpacked_func(q, kv, causal=True), expected)
        ends = torch.tensor([0, 6, 12], dtype=torch.int32)
        flat = qkv.flatten(0, 1)
        output = flash_attn.flash_attn_varlen_qkvpacked_func(flat, ends, 6, causal=True)
        assert_close(output.unflatten(0, (2, 6)), expected)
        output = flash_attn.flash_attn_varlen_kvpacked_func(
            flat[:, 0], flat[:, 1:], ends, ends, 6, 6, causal=True
        )
        assert_close(output.unflatten(0, (2, 6)), expected)

    def test_dropout(self):
        q, k, v = torch.randn(3, 1, 4, 2, 8).unbind(0)
        torch.manual_seed(1)
        found = flash_attn.flash_attn_func(q, k, v.new_ones(v.shape), 0.5)
        assert not torch.equal(found, torch.ones_like(found))
        assert not flash_attn.flash_attn_func(q, k, v, 1.0).any()

    @pytest.mark.parametrize("causal", [False, True])
    def test_varlen_and_pages(self, causal):
        lengths_q, lengths_k = [3, 1, 4], [6, 5, 4]
        ends_q, ends_k = (
            torch.tensor([0, *x], dtype=torch.int32).cumsum(0, dtype=torch.int32)
            for x in (lengths_q, lengths_k)
        )
        q, k, v = tensors((8, 4, 8), (15, 2, 8), (15, 2, 8))
        arguments = (ends_q, ends_k, 4, 6)
        options = {"causal": causal, "window_size": (4, -1)}
        output, lse, _ = flash_attn.flash_attn_varlen_func(
            q, k, v, *arguments, **options, return_attn_probs=True
        )
        parts = zip(q.split(lengths_q), k.split(lengths_k), v.split(lengths_k), strict=True)
        expected = [reference(*(x[None] for x in part), None, causal, (4, -1)) for part in parts]
        close(output, torch.cat([x[0] for x, _ in expected]))
        close(lse, torch.cat([x[0] for _, x in expected], 1))
        # Every document in two pages of four rows, in reverse.
        table = torch.tensor([[5, 4], [3, 2], [1, 0]], dtype=torch.int32)
        pages = []
        for x in (k, v):
            page = torch.full((6, 4, 2, 8), math.nan)
            for n, rows in enumerate(x.detach().split(lengths_k)):
                for first, number in zip(rows.split(4), table[n], strict=False):
                    page[number, : len(first)] = first
            pages.append(page)
        with torch.no_grad():
            paged = flash_attn.flash_attn_varlen_func(
                q, *pages, *arguments, **options, block_table=table
            )
        assert_close(paged, output.detach())

    @pytest.mark.parametrize("is_paged", [False, True])
    def test_cache(self, is_paged):
        """Two rows of different lengths get two keys each, rotated, and attend to all they have."""
        lengths, new = [3, 5], 2
        k_cache, v_cache = torch.randn(2, 2, 8, 2, 16).unbind(0)
        q = torch.randn(2, new, 4, 16)
        k, v = torch.randn(2, 2, new, 2, 16).unbind(0)
        angle, slopes = torch.rand(8, 4), torch.rand(4)
        rows, caches = [], [k_cache.clone(), v_cache.clone()]
        for b, length in enumerate(lengths):
            at = slice(length, length + new)
            turned = [rotated(x[b], angle[at]) for x in (q, k)]
            keys, values = torch.cat([k_cache[b, :length], turned[1]]), v_cache[b].clone()
            values[at] = v[b]
            given = (turned[0][None], keys[None], values[None, : at.stop])
            rows.append(reference(*given, 0.3, True, (3, -1), 5.0, slopes))
            caches[0][b, at], caches[1][b, at] = turned[1], v[b]
        options = {}
        if is_paged:
            k_cache, v_cache = (x.view(4, 4, 2, 16) for x in (k_cache, v_cache))
            options = {"block_table": torch.tensor([[0, 1], [2, 3]], dtype=torch.int32)}
        output, lse = flash_attn.flash_attn_with_kvcache(
            q, k_cache, v_cache, k, v, angle.cos(), angle.sin(),
            torch.tensor(lengths, dtype=torch.int32), softmax_scale=0.3, causal=True,
            window_size=(3, -1), softcap=5.0, alibi_slopes=slopes, return_softmax_lse=True,
            **options,
        )  # fmt: skip
        close(output, torch.cat([x for x, _ in rows]))
        close(lse, torch.cat([x for _, x in rows]))
        assert_close(k_cache.view(2, 8, 2, 16), caches[0])
        assert_close(v_cache.view(2, 8, 2, 16), caches[1])
        without = flash_attn.flash_attn_with_kvcache(
            q, k_cache, v_cache, **options, cache_seqlens=2
        )
        close(without, reference(q, *(x[:, :2] for x in caches))[0])

    def test_errors_name_the_argument(self):
        q = torch.randn(2, 6, 4, 8)
        with pytest.raises(RuntimeError, match="key"):
            flash_attn.flash_attn_func(q, q[..., :7], q)
        # Heads and numbers of [L, H, D], which flash_attn refuses, would change places.
        with pytest.raises(RuntimeError, match=r"q is \[6, 4, 8\], but \[B, L, H, D\]"):
            flash_attn.flash_attn_func(q[0], q[0], q[0])
        with pytest.raises(RuntimeError, match="k_cache is"):
            flash_attn.flash_attn_with_kvcache(q, q[0], q)
        with pytest.raises(RuntimeError, match=r"v is \[4\], but \[B, L, H, D\]"):
            flash_attn.flash_attn_with_kvcache(q, q, q, q, q[0, 0, :, 0], cache_seqlens=0)
        ends = torch.tensor([0, 6])
        for name, arguments, layout in (
            ("qkvpacked", (q,), r"qkv is .*, but \[B, L, 3, H, D\]"),
            ("kvpacked", (q, q), r"kv is .*, but \[B, S, 2, Hkv, D\]"),
            ("varlen_qkvpacked", (q[0, 0], ends, 6), r"qkv is \[4, 8\], but \[T, 3, H, D\]"),
            ("varlen_kvpacked", (q[0], q, ends, ends, 6, 6), r"kv is .*, but \[Tk, 2, Hkv, D\]"),
        ):
            with pytest.raises(RuntimeError, match=layout):
                getattr(flash_attn, f"flash_attn_{name}_func")(*arguments)


def rotated(x, angle):
    """[L, H, D], of whose first numbers those at 2 i and 2 i + 1 are turned by angle [L, i]."""
    pairs = torch.view_as_complex(x[..., : 2 * angle.size(1)].unflatten(-1, (-1, 2)).contiguous())
    turned = torch.view_as_real(pairs * torch.polar(torch.ones_like(angle), angle)[:, None])
    return torch.cat([turned.flatten(-2), x[..., 2 * angle.size(1) :]], -1)


class Below:
    """A mask as xformers' are, of a class that is not known here: no key above the diagonal."""

    def materialize(self, shape, dtype=torch.float32, device="cpu"):
        return torch.full(shape, -math.inf, dtype=dtype, device=device).triu(1)


class TestXformers:
    @pytest.mark.parametrize("rank", [3, 4, 5])
    def test_ranks(self, rank):
        heads = {3: (), 4: (4,), 5: (2, 2)}[rank]
        q, k, v = (torch.randn(2, n, *heads, 8) for n in (5, 7, 7))
        bias = torch.randn(2, *heads, 5, 7, requires_grad=True)
        output = xformers.memory_efficient_attention(q, k, v, bias, scale=0.3)
        rows = (x.movedim(1, -2).double() for x in (q, k, v))
        q, k, v = rows
        expected = (q @ k.mT * 0.3 + bias.double()).softmax(-1) @ v
        close(output, expected.movedim(-2, 1))
        grad = torch.randn_like(output)
        (found,) = torch.autograd.grad(output, bias, grad)
        close(found, torch.autograd.grad(expected.movedim(-2, 1), bias, grad.double())[0].double())

    def test_masks(self):
        q, k, v = (torch.randn(1, n, 2, 8) for n in (5, 7, 7))
        run = xformers.memory_efficient_attention
        from_below = run(q, k, v, xformers.LowerTriangularFromBottomRightMask())
        close(from_below, reference(q, k, v, causal=True)[0])
        first = run(q, k, v, xformers.LowerTriangularMask())
        close(first, reference(q, k[:, :5], v[:, :5], causal=True)[0])
        assert_close(run(q, k, v, Below()), first)
        assert run(q, k, v, output_dtype=torch.float64).dtype == torch.float64
        with pytest.raises(TypeError, match="attn_bias is str"):
            run(q, k, v, "causal")

    @pytest.mark.parametrize("heads", [(2,), (2, 2)])
    def test_sequences_in_one(self, heads):
        lengths = [3, 4]
        q, k, v = (torch.randn(1, 7, *heads, 8) for _ in range(3))
        mask = xformers.BlockDiagonalMask.from_seqlens(lengths)
        parts = list(zip(*(x.flatten(2, -2).split(lengths, 1) for x in (q, k, v)), strict=True))
        from_below = mask.make_causal_from_bottomright()
        for bias, causal in ((mask, False), (mask.make_causal(), True), (from_below, True)):
            output = xformers.memory_efficient_attention(q, k, v, bias)
            expected = torch.cat([reference(*part, causal=causal)[0] for part in parts], 1)
            close(output.flatten(2, -2), expected)
        with pytest.raises(ValueError, match="not as many"):
            xformers.BlockDiagonalMask.from_seqlens([3, 4], [4, 3]).make_causal()
        with pytest.raises(ValueError, match="query is"):
            xformers.memory_efficient_attention(
                *(x.expand(2, *x.shape[1:]) for x in (q, k, v)), mask
            )
        for key in (k[:, 1:], k.expand(2, *k.shape[1:])):
            with pytest.raises(ValueError, match=r"key is \[.*, but \[1, 7, …\], as many rows as"):
                xformers.memory_efficient_attention(q, key, v, mask)

    def test_sequences_of_fewer_queries_than_keys(self):
        q, (k, v) = torch.randn(1, 3, 2, 8), torch.randn(2, 1, 9, 2, 8)
        mask = xformers.BlockDiagonalMask.from_seqlens([1, 2], [4, 5])
        for bias, causal in ((mask, False), (mask.make_causal_from_bottomright(), True)):
            output = xformers.memory_efficient_attention(q, k, v, bias)
            parts = zip(q.split([1, 2], 1), k.split([4, 5], 1), v.split([4, 5], 1), strict=True)
            close(output, torch.cat([reference(*part, causal=causal)[0] for part in parts], 1))

    def test_causal_sequences_of_other_queries_than_keys(self):
        """Fewer, none, as many and more: each is aligned at its first query and key."""
        lengths_q, lengths_k = [2, 0, 3, 5], [4, 1, 3, 2]
        q, (k, v) = torch.randn(1, 10, 2, 8), torch.randn(2, 1, 10, 2, 8)
        mask = xformers.BlockDiagonalCausalMask.from_seqlens(lengths_q, lengths_k)
        parts = zip(
            q.split(lengths_q, 1), k.split(lengths_k, 1), v.split(lengths_k, 1), strict=True
        )
        expected = [xformers.memory_efficient_attention(*x, Below()) for x in parts]
        assert_close(xformers.memory_efficient_attention(q, k, v, mask), torch.cat(expected, 1))
