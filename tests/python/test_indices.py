"""indices: attention of each query to the keys that are chosen for it."""

import pytest
import torch
from common import COMPILERS, TOLERANCES, attend, dtypes_of
from torch.autograd import gradcheck, gradgradcheck
from torch.profiler import profile

import qkv
from qkv import testing

B, H, HKV, L, S, D, DV, K = 2, 4, 2, 70, 400, 8, 5, 7
# Few enough keys between them that queries share some, and too many different ones to share.
NEAR, FAR = 100, S


def inputs(dtype=torch.float64, requires_grad=False, queries=L, seqlen=S):
    torch.manual_seed(0)
    shapes = (B, H, queries, D), (B, HKV, seqlen, D), (B, HKV, seqlen, DV)
    return [torch.randn(s, dtype=dtype).requires_grad_(requires_grad) for s in shapes]


def choose(*heads, among=NEAR, queries=L, seqlen=S):
    """Some of them -1, some named twice."""
    torch.manual_seed(1)
    step = seqlen // among
    return (torch.randint(-1, among, (B, *heads, queries, K)) * step).clamp(min=-1)


def mask_of(indices, seqlen=S):
    """bool [B, H or 1, L, S], by the numbers themselves."""
    by_head = indices if indices.dim() == 4 else indices[:, None]
    mask = (by_head[..., None] == torch.arange(seqlen)).any(-2)
    return mask if mask.size(1) == 1 else mask.repeat_interleave(H // HKV, 1)


def ways_of(call):
    """Which of the three ways the call goes, by the operators that it runs."""
    with profile() as recorded:
        call()
    names = {event.name for event in recorded.events()}
    ways = {
        "pages": "qkv::varlen_attention_paged", "blocks": "aten::index_select",
        "mask": "aten::scatter",
    }  # fmt: skip
    return {way for way, name in ways.items() if name in names}


HEADS = pytest.mark.parametrize("heads", [(), (1,), (HKV,)], ids=["rows", "one_head", "key_heads"])
OPTIONS = {
    "plain": {}, "causal": {"is_causal": True}, "window": {"window_size": (60, 9), "softcap": 2.0},
    "mask": {"attn_mask": torch.rand(B, 1, L, S, generator=torch.Generator().manual_seed(2)) > 0.3},
    "scale": {"scale": 0.7},
}  # fmt: skip
options_of = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)


def expected_of(tensors, indices, options):
    mask = mask_of(indices)
    given = options.get("attn_mask")
    others = {n: x for n, x in options.items() if n != "attn_mask"}
    mask = mask if given is None else mask & given
    return attend(*tensors, mask, enable_gqa=True, **others)


@HEADS
@options_of
@pytest.mark.parametrize("among", [NEAR, FAR], ids=["near", "far"])
def test_is_a_mask(heads, options, among):
    """Results with and without gradients, and gradients, which go three ways."""
    tensors, indices = inputs(requires_grad=True), choose(*heads, among=among)
    output, lse = expected_of(tensors, indices, options)

    def call():
        return qkv.attention(*tensors, indices=indices, enable_gqa=True, return_lse=True, **options)

    found = call()
    with torch.no_grad():
        alone = call()
    for ours in (found, alone):
        torch.testing.assert_close(ours[0], output, rtol=0, atol=1e-11)
        torch.testing.assert_close(ours[1], lse, rtol=0, atol=1e-11)
    seen = lse.isfinite()
    grads = torch.randn_like(output), torch.where(seen, torch.randn_like(lse), 0)
    expected = torch.autograd.grad((output, lse), tensors, grads)
    for ours, theirs in zip(torch.autograd.grad(found, tensors, grads), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-11)


@HEADS
def test_the_truth_has_them(heads):
    tensors, indices = inputs(), choose(*heads)
    found = testing.attention(*tensors, indices=indices, enable_gqa=True)
    expected = testing.attention(*tensors, mask_of(indices), enable_gqa=True)
    assert torch.equal(found, expected)


def test_which_way():
    """Pages where nothing is recorded; blocks where queries share keys; else a mask."""
    tensors = inputs(requires_grad=True)

    def ways(among=NEAR, heads=(), grad=True, **options):
        indices = choose(*heads, among=among)
        with torch.set_grad_enabled(grad):
            return ways_of(
                lambda: qkv.attention(*tensors, indices=indices, enable_gqa=True, **options)
            )

    assert ways(grad=False) == {"pages"} and ways(grad=False, heads=(HKV,)) == {"pages"}
    assert ways(grad=False, among=FAR, sinks=torch.zeros(H)) == {"pages"}
    assert ways() == {"blocks"} and ways(is_causal=True, softcap=1.0) == {"blocks"}
    assert ways(among=FAR) == {"mask"} and ways(heads=(HKV,)) == {"mask"}
    bias = torch.zeros(S, dtype=torch.float64)
    for option in (
        {"bias": bias}, {"attn_mask": bias}, {"alibi_slopes": torch.ones(H)}, {"dropout_p": 0.5},
    ):  # fmt: skip
        assert ways(grad=False, **option) == {"mask"}


def test_the_way_of_an_item_is_its_own():
    """It has the bits that it has alone, beside items that go another way."""
    tensors = [x.repeat(2, 1, 1, 1) for x in inputs()]
    indices = torch.cat([choose(among=NEAR), choose(among=FAR)])
    mask = torch.rand(4, 1, L, S) > 0.1

    def results(rows):
        own = [x[rows].clone().requires_grad_() for x in tensors]
        call = {"indices": indices[rows], "attn_mask": mask[rows], "enable_gqa": True}
        output = qkv.attention(*own, **call)
        return output, *torch.autograd.grad(output.sin().sum(), own)

    whole = results(slice(None))
    assert ways_of(lambda: results(slice(None))) == {"blocks", "mask"}
    for n, way in enumerate(["blocks", "blocks", "mask", "mask"]):
        one = slice(n, n + 1)
        assert ways_of(lambda one=one: results(one)) == {way}
        for alone, among in zip(results(one), whole, strict=True):
            assert torch.equal(alone, among[one])


@dtypes_of("f32", "bf16", "f16")
def test_other_dtypes(dtype):
    tensors, indices = inputs(dtype), choose()
    expected, _ = expected_of([x.double() for x in tensors], indices, {})
    for grad in (False, True):
        query, *others = tensors
        found = qkv.attention(
            query.requires_grad_(grad), *others, indices=indices.int(), enable_gqa=True
        )
        assert found.dtype == dtype
        torch.testing.assert_close(found.double(), expected, rtol=0, atol=TOLERANCES[dtype])


def test_sinks_and_masks_that_are_added():
    """A floating mask hides with -inf what is not chosen, and keeps its gradient."""
    tensors, indices = inputs(requires_grad=True), choose()
    sinks, bias = torch.randn(2, H, S, dtype=torch.float64).unbind()
    sinks, bias = sinks[:, 0].requires_grad_(), bias[0].clone().requires_grad_()
    leaves = [*tensors, sinks, bias]
    found = qkv.attention(*tensors, bias, indices=indices, sinks=sinks, enable_gqa=True)
    hidden = bias.expand(B, 1, L, S).masked_fill(~mask_of(indices), -torch.inf)
    expected = attend(*tensors, hidden, sinks=sinks, enable_gqa=True)[0]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-11)
    grad = torch.randn_like(found)
    for ours, theirs in zip(
        torch.autograd.grad(found, leaves, grad), torch.autograd.grad(expected, leaves, grad),
        strict=True,
    ):  # fmt: skip
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-11)


@pytest.mark.parametrize("among", [4, 40], ids=["blocks", "mask"])
def test_derivatives(among):
    tensors = [x[:1, ..., :3].requires_grad_() for x in inputs(queries=3, seqlen=40)]
    indices = choose(among=among, queries=3, seqlen=40)[:1, ..., :3]
    f = lambda *x: qkv.attention(*x, indices=indices, enable_gqa=True)  # noqa: E731
    assert gradcheck(f, tensors, check_forward_ad=True)
    assert gradgradcheck(f, tensors, check_fwd_over_rev=True)


def test_keys_of_latents():
    """Values that are a part of the keys' rows are read from them."""
    rows = torch.randn(B, 1, S, D, dtype=torch.float64, requires_grad=True)
    query, indices = inputs()[0], choose()

    def call():
        return qkv.attention(query, rows, rows[..., :DV], indices=indices, enable_gqa=True)

    expected = attend(query, rows, rows[..., :DV], mask_of(indices), enable_gqa=True)[0]
    found = call()
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-11)
    with torch.no_grad():
        torch.testing.assert_close(call(), expected, rtol=0, atol=1e-11)
    ours, theirs = (torch.autograd.grad(x.sin().sum(), rows)[0] for x in (found, expected))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-11)


@pytest.mark.parametrize("backend", COMPILERS)
@pytest.mark.parametrize("dynamic", [False, True])
def test_compile(backend, dynamic):
    tensors, indices = inputs(requires_grad=True), choose()
    f = lambda *x: qkv.attention(*x[:3], indices=x[3], enable_gqa=True).sin().sum()  # noqa: E731
    compiled = torch.compile(f, backend=backend, fullgraph=True, dynamic=dynamic)
    found = torch.autograd.grad(compiled(*tensors, indices), tensors)
    for ours, theirs in zip(found, torch.autograd.grad(f(*tensors, indices), tensors), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-11)


def test_vmap():
    query, key, value = inputs()
    f = lambda q, k, v, i: qkv.attention(q, k, v, indices=i, enable_gqa=True)  # noqa: E731
    for indices in (choose(), choose(HKV)):
        found = torch.vmap(f)(query, key, value, indices)
        torch.testing.assert_close(found, f(query, key, value, indices), rtol=0, atol=1e-11)
    with pytest.raises(RuntimeError, match="out of bounds"):  # the number behind the last key's
        torch.vmap(f)(query, key, value, torch.full_like(choose(), S))


def test_autocast_and_meta():
    tensors, indices = inputs(torch.float32), choose()
    with torch.autocast("cpu", torch.bfloat16):
        found = qkv.attention(*tensors, indices=indices, enable_gqa=True)
    halves = [x.bfloat16() for x in tensors]
    assert torch.equal(found, qkv.attention(*halves, indices=indices, enable_gqa=True))
    meta = [x.to("meta") for x in tensors]
    found = qkv.attention(*meta, indices=indices.to("meta"), enable_gqa=True)
    assert found.shape == (B, H, L, DV) and found.device.type == "meta"


@pytest.mark.parametrize("grad", [False, True])
def test_widest_window(grad):
    """Positions and a side of any size add up without overflow."""
    tensors, indices = inputs(requires_grad=True), choose(among=NEAR)
    with torch.set_grad_enabled(grad):
        open_, widest = (
            qkv.attention(*tensors, indices=indices, enable_gqa=True, window_size=sides)
            for sides in ((-1, -1), (2**63 - 1, 2**63 - 1))
        )
    assert torch.equal(open_, widest)


@pytest.mark.parametrize("sizes", [(0, S), (L, 0), (0, 0)])
def test_nothing(sizes):
    tensors = inputs(requires_grad=True, queries=sizes[0], seqlen=sizes[1])
    indices = torch.full((B, sizes[0], K), -1)
    output, lse = qkv.attention(*tensors, indices=indices, enable_gqa=True, return_lse=True)
    assert (
        output.shape == (B, H, sizes[0], DV) and (output == 0).all() and (lse == -torch.inf).all()
    )
    output.sum().backward()


@pytest.mark.parametrize("grad", [False, True])
def test_bad_input(grad):
    tensors, indices = inputs(requires_grad=True), choose()
    cases = [
        (indices.double(), "indices is float64, but int32 or int64 is expected"),
        (indices[:, :5], r"indices has the shape \[2, 5, 7\], but its second last dimension"),
        (indices[0, 0], r"indices has the shape \[7\], but \[\.\.\., L, k\] or"),
        (choose(3), r"indices has the shape \[2, 3, 70, 7\], but its heads must be key's, 2, or 1"),
        (indices + S, r"indices has the number \d+, but key has 400 keys"),
        (
            indices.repeat(2, 1, 1),
            r"indices has the shape \[4, 70, 7\], whose leading dimensions "
            r"do not broadcast to \[2\]",
        ),
    ]
    for bad, words in cases:
        with torch.set_grad_enabled(grad), pytest.raises(RuntimeError, match=words):
            qkv.attention(*tensors, indices=bad, enable_gqa=True)
