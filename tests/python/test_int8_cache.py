"""int8 caches: attention over the numbers that they stand for, and appending, which rounds."""

import pytest
import torch
from common import compute_type
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import LAYOUTS, lay_out, one_example_in
from test_kvcache import calls, make
from torch.library import opcheck
from torch.nn.attention.varlen import AuxRequest

import qkv
from qkv import testing
from qkv.testing._items import quantize

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SCALES = ["tensor", "head", "token"]
INT8_MEMORY = ("k_cache", "v_cache", "k_scale", "v_scale")


def scale_like(cache, kind):
    """A scale of that kind for numbers of about 1."""
    shape = {"tensor": (), "head": cache.shape[1:2], "token": cache.shape[:3]}[kind]
    return torch.rand(shape) / 50 + 0.02


def as_int8(call, k_kind="token", v_kind="token", dtype=None):
    """The call with int8 caches instead of its own."""
    call = dict(call)
    for name, kind in (("k", k_kind), ("v", v_kind)):
        cache = call[f"{name}_cache"]
        call[f"{name}_scale"] = scale = scale_like(cache, kind)
        call[f"{name}_cache"] = torch.randint_like(cache, -127, 128, dtype=torch.int8)
        assert scale.dtype == torch.float32
    if dtype is not None:
        for name in ("query", "key", "value"):
            if name in call:
                call[name] = call[name].to(dtype)
    return call


def numbers(cache, scale):
    return cache.double() * (scale.unsqueeze(-1) if scale.dim() == 3 else scale.view(-1, 1, 1))


def as_words(query):
    """What half precision multiplies int8 by: whole numbers of 15 bits, or of 14 where there are
    many, times a power of two for each row."""
    if query.dtype == torch.float32:
        return query
    bits = 14 if query.size(-1) < 512 else 13
    largest = query.double().abs().amax(-1, keepdim=True)
    unit = torch.exp2(torch.floor(torch.log2(largest)) - bits)
    return ((query / unit).round() * unit).float()


def compare(call):
    """Also that a float cache of the same numbers would not have given better results, but for the
    words."""
    expected, dtype = testing.attention_with_kvcache(**call), call["query"].dtype
    output, lse = qkv.attention_with_kvcache(**call, return_softmax_lse=True)
    assert output.dtype == dtype and lse.dtype == torch.float32
    words = call | {"query": as_words(call["query"])}
    theirs = testing.attention_with_kvcache(**words, dtype=compute_type(dtype))
    testing.assert_close(output, expected[0], theirs[0].to(dtype))
    testing.assert_close(lse, expected[1], None if dtype == torch.float32 else theirs[1], times=1.1)
    for n, truth in zip("kv", expected[2:], strict=True):  # to the bit, wherever a row was appended
        assert torch.equal(numbers(call[f"{n}_cache"], call[f"{n}_scale"]), truth)
    return output


@st.composite
def int8_calls(draw):
    call = draw(calls())
    dtype = call["query"].dtype
    kinds = st.sampled_from(SCALES)
    call = as_int8(
        call, draw(kinds), draw(kinds), None if dtype != torch.float64 else torch.float32
    )
    for name in INT8_MEMORY:
        if call[name].dim() > 1:
            call[name] = lay_out(call[name], draw(st.sampled_from(LAYOUTS)))
    return call


@pytest.mark.usefixtures("isa")
class TestAgainstComposition:
    @settings(max_examples=one_example_in(2))
    @given(int8_calls())
    def test_drawn(self, call):
        compare(call)

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("block_size", [None, 16])
    @pytest.mark.parametrize("L, group", [(1, 1), (1, 4), (1, 8), (16, 2), (70, 1)])
    def test_long(self, L, group, block_size, dtype):
        call = make(
            2, 2 * group, 2, L, L, 1500, 64, dtype=dtype, lengths=[1400, 600], block_size=block_size
        )
        compare(as_int8(call | {"causal": True}))

    @pytest.mark.one_in(2)
    @pytest.mark.parametrize("L, draws", [(1, 16), (40, 1)])
    def test_error_is_that_of_a_float_cache(self, L, draws):
        """But for the product of score and scale, where that is rounded by itself: without FMA.

        The ratio of one draw's mean errors has a standard deviation of 0.04 where there is one
        query a sequence, that of 16 draws 0.01; they are 1.01 times as large on AVX2, and 1.07
        times on generic.
        """
        errors = torch.zeros(2, dtype=torch.float64)
        for seed in range(draws):
            torch.manual_seed(seed)
            call = make(32, 8, 2, L, None, 1000, 64, dtype=torch.float32, lengths=[1000, 700] * 16)
            call = as_int8(call)
            truth = testing.attention_with_kvcache(**call)[0]
            ours = qkv.attention_with_kvcache(**call)
            wide = {f"{n}_cache": numbers(call[f"{n}_cache"], call[f"{n}_scale"]) for n in "kv"}
            plain = {n: x for n, x in call.items() if n not in INT8_MEMORY}
            plain |= {n: x.float() for n, x in wide.items()}
            theirs = qkv.attention_with_kvcache(**plain)
            errors += torch.stack([(x.double() - truth).abs().mean() for x in (ours, theirs)])
        has_fma = qkv.active_isa() != "generic"
        assert errors[0] <= (1.05 if has_fma else 1.15) * errors[1]


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("D", [480, 512, 992, 1024])
@pytest.mark.parametrize("sign", [1, -1])
def test_the_largest_sums_do_not_overflow(D, sign):
    """The largest words that there are, times -128, which a cache may have though nothing is
    rounded to it."""
    query = torch.full((1, 4, 1, D), sign * 1.9921875, dtype=torch.bfloat16)
    cache = torch.full((1, 1, 3, D), -128, dtype=torch.int8)
    scale = torch.tensor([[[1.0, 0.5, 0.25]]]) / D
    call = {"k_cache": cache, "v_cache": cache, "k_scale": scale, "v_scale": scale}
    compare(call | {"query": query, "key": None, "value": None, "cache_seqlens": 3})


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("exponent", [-100, 0, 100])
def test_scales_of_any_size(exponent):
    call = as_int8(make(1, 4, 2, 1, None, 40, 64, dtype=torch.bfloat16, lengths=[33]))
    call["v_scale"] = call["v_scale"] * 2.0**exponent
    output = qkv.attention_with_kvcache(**call)
    call["v_scale"] = call["v_scale"] / 2.0**exponent
    torch.testing.assert_close(output / 2.0**exponent, qkv.attention_with_kvcache(**call))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", [None, 4])
@pytest.mark.parametrize("kind", SCALES)
def test_append_rounds_to_nearest_even(kind, block_size, dtype):
    call = make(2, L_new=3, S=12, dtype=dtype, lengths=[2, 5], block_size=block_size)
    call = as_int8(call, kind, kind)
    before = {n: call[n].clone() for n in INT8_MEMORY}
    compare(call)
    for n in ("k_scale", "v_scale"):
        changed = (call[n] != before[n]).sum()
        assert changed == (2 * 2 * 3 if kind == "token" else 0)  # B, Hkv and L_new
    # The largest number of an appended row is 127 or -127 where the row made its scale.
    if kind == "token" and block_size is None:
        assert (call["k_cache"][0, :, 2:5].abs().amax(-1) == 127).all()


def append(row, scale):
    """What an int8 cache of one place has of a row of keys, and the scale after it."""
    row = torch.tensor(row)[None, None, None]
    cache = torch.full(row.shape, 77, dtype=torch.int8)
    scale = scale.clone()
    qkv.attention_with_kvcache(
        torch.ones_like(row), cache, cache.clone(), row, row, cache_seqlens=0,
        k_scale=scale, v_scale=scale.clone(),
    )  # fmt: skip
    return cache.flatten().tolist(), scale.flatten().tolist()


def test_ties_clamping_and_numbers_that_are_none():
    one = torch.tensor([1.0])
    row = [0.5, 1.5, -2.5, 126.5, 127.4, 300, -300, float("inf"), -float("inf"), float("nan"), -0.0]
    expected = [0, 2, -2, 126, 127, 127, -127, 127, -127, 0, 0]
    assert append(row, one) == (expected, [1.0])
    token = torch.full((1, 1, 1), 9.0)
    assert append([0.0, 0.0], token) == ([0, 0], [0.0])
    assert append([254.0, -127.0], token) == ([127, -64], [2.0])  # -63.5, a tie
    for bad in ("nan", "inf"):
        ints, (scale,) = append([1.0, float(bad)], token)
        assert scale != scale and ints == [0, 0]
    assert append([1e-45, 0.0], token)[1] == [0.0]  # 1e-45 / 127 is 0: such numbers are lost


def test_a_row_that_is_not_finite_does_not_leak():
    call = as_int8(make(1, 2, 2, 1, None, 8, dtype=torch.float32, lengths=[8]))
    call["k_scale"][:, :, :3] = call["v_scale"][:, :, :3] = float("nan")
    assert qkv.attention_with_kvcache(**call).isnan().all()
    assert qkv.attention_with_kvcache(**call, window_size=(4, 0)).isfinite().all()
    hidden = call | {"cache_leftpad": torch.tensor([3])}
    assert qkv.attention_with_kvcache(**hidden).isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", SCALES)
@pytest.mark.parametrize("L", [1, 30])
def test_pages_of_packed_documents(L, kind, dtype):
    """The same numbers as in a cache of as many rows."""
    call = make(2, 4, 2, L, None, 48, dtype=dtype, lengths=[48, 40], block_size=16)
    call = as_int8(call, kind, kind)
    expected, expected_lse = qkv.attention_with_kvcache(**call, return_softmax_lse=True)
    ends = torch.tensor([0, L, 2 * L])
    pages = {
        f"{n}_scale": x.transpose(1, 2).contiguous() if x.dim() == 3 else x
        for n, x in (("k", call["k_scale"]), ("v", call["v_scale"]))
    }
    output, lse = qkv.varlen_attn(
        call["query"].transpose(1, 2).flatten(0, 1), call["k_cache"].transpose(1, 2),
        call["v_cache"].transpose(1, 2), ends, None, L, 48, seqused_k=call["cache_seqlens"],
        block_table=call["block_table"], enable_gqa=True, return_aux=AuxRequest(lse=True), **pages,
    )  # fmt: skip
    assert torch.equal(output.unflatten(0, (2, L)).transpose(1, 2), expected)
    assert torch.equal(lse.unflatten(1, (2, L)).transpose(0, 1), expected_lse)


@pytest.mark.parametrize("L", [1, 20])
def test_same_bits_for_any_threads(threads, L):
    call = make(2, 8, 2, L, None, 1500, 64, dtype=torch.float32, lengths=[1500, 900])
    call = as_int8(call)
    threads(1)
    expected = qkv.attention_with_kvcache(**call)
    for n in (2, 3):
        threads(n)
        assert torch.equal(qkv.attention_with_kvcache(**call), expected)


def test_foreign_memory_between_elements():
    call = as_int8(make(2, L=3, L_new=2, dtype=torch.float32))
    for name in ("k_scale", "v_scale", "key"):
        x = call[name]
        memory = bytearray(x.numel() * 4 + 1)
        call[name] = torch.frombuffer(memory, dtype=x.dtype, offset=1).view(x.shape).copy_(x)
    compare(call)


def test_autocast_leaves_them():
    call = as_int8(make(2, dtype=torch.float32))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert qkv.attention_with_kvcache(**call).dtype == torch.bfloat16
    ends = torch.tensor([0, 1, 2])
    paged = as_int8(make(2, L_new=None, dtype=torch.float32, lengths=[3, 9], block_size=4))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = qkv.varlen_attn(
            paged["query"][:, :, 0], paged["k_cache"].transpose(1, 2),
            paged["v_cache"].transpose(1, 2), ends, None, 1, 9, seqused_k=paged["cache_seqlens"],
            block_table=paged["block_table"], enable_gqa=True, k_scale=torch.ones(1),
            v_scale=torch.ones(2),
        )  # fmt: skip
    assert output.dtype == torch.bfloat16


def test_saved_scales_know_that_they_were_written():
    call = as_int8(make(2, dtype=torch.float32), "token", "head")
    versions = [call[n]._version for n in INT8_MEMORY]
    with torch.enable_grad():
        qkv.attention_with_kvcache(**call)
    assert [call[n]._version - v for n, v in zip(INT8_MEMORY, versions, strict=True)] == [
        1,
        1,
        1,
        0,
    ]


def test_compiled():
    call = as_int8(make(2, dtype=torch.float32, lengths=[3, 5]))
    copy = {n: x.clone() for n, x in call.items()}
    expected = qkv.attention_with_kvcache(**call)
    compiled = torch.compile(qkv.attention_with_kvcache, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(**copy), expected)
    for name in INT8_MEMORY:
        assert torch.equal(copy[name], call[name])


@pytest.mark.parametrize("kind", SCALES)
@pytest.mark.parametrize("L_new", [None, 2])
def test_opcheck(L_new, kind):
    call = as_int8(make(2, L_new=L_new, dtype=torch.float32, lengths=[3, 5]), kind, "token")
    opcheck(torch.ops.qkv.attention_with_kvcache.default, (), call)


def test_opcheck_of_pages():
    call = as_int8(make(2, L_new=None, dtype=torch.float32, lengths=[3, 9], block_size=4), "head")
    paged = {
        "query": call["query"][:, :, 0], "key": call["k_cache"].transpose(1, 2),
        "value": call["v_cache"].transpose(1, 2), "cu_seq_q": torch.tensor([0, 1, 2]),
        "cu_seq_k": None, "seqused_k": call["cache_seqlens"], "block_table": call["block_table"],
        "enable_gqa": True, "k_scale": call["k_scale"],
        "v_scale": call["v_scale"].transpose(1, 2).contiguous(),
    }  # fmt: skip
    opcheck(torch.ops.qkv.varlen_attention_paged.default, (), paged)


def test_meta():
    call = as_int8(make(2, Dv=4, dtype=torch.bfloat16))
    meta = {n: x.to("meta") for n, x in call.items()}
    output = qkv.attention_with_kvcache(**meta)
    assert output.shape == (2, 4, 1, 4) and output.dtype == torch.bfloat16


Q = as_int8(make(2, dtype=torch.float32))
OVERLAPPING = torch.ones(1, 2, 20).expand(2, -1, -1)
BAD = {
    "one int8": ({"v_cache": torch.zeros(2, 2, 20, 8)}, "v_cache is float32, but k_cache is int8"),
    "one int8, query half": (
        {n: Q[n].bfloat16() for n in ("query", "key", "value")}
        | {"v_cache": torch.zeros(2, 2, 20, 8)},
        "v_cache is float32, but k_cache is int8; expected int8 for both or neither",
    ),
    "no scale": ({"k_scale": None}, "k_cache is int8, but k_scale is None"),
    "no v_scale": ({"v_scale": None}, "v_cache is int8, but v_scale is None"),
    "float caches": (
        {n: torch.zeros(2, 2, 20, 8) for n in ("k_cache", "v_cache")},
        "k_scale is given, but k_cache is float32",
    ),
    "v_scale alone": (
        {n: torch.zeros(2, 2, 20, 8) for n in ("k_cache", "v_cache")} | {"k_scale": None},
        "v_scale is given, but v_cache is float32",
    ),
    "uint8": ({"k_cache": Q["k_cache"].to(torch.uint8)}, "k_cache is uint8, but query is float32"),
    "float64": (
        {n: Q[n].double() for n in ("query", "key", "value")},
        "query is float64, but with int8 k_cache float32, bfloat16 or float16",
    ),
    "scale dtype": ({"k_scale": Q["k_scale"].double()}, "k_scale is float64, but float32"),
    "scale shape": (
        {"v_scale": torch.ones(2, 20, 2)},
        r"v_scale has the shape \[2, 20, 2\], but \[1\], \[Hkv\] = \[2\] or the shape of v_cache "
        r"without its last dimension, \[2, 2, 20\], is expected",
    ),
    "scale of 3 heads": ({"k_scale": torch.ones(3)}, r"k_scale has the shape \[3\]"),
    "scale 2-D": ({"k_scale": torch.ones(2, 2)}, r"k_scale has the shape \[2, 2\]"),
    "scale device": ({"k_scale": Q["k_scale"].to("meta")}, "k_scale is on meta"),
    "key int8": ({"key": Q["key"].to(torch.int8)}, "key is int8, but query is float32"),
    "query int8": ({"query": Q["query"].to(torch.int8)}, "query is int8"),
    "overlapping scale": ({"k_scale": OVERLAPPING}, "k_scale, with the strides.*share memory"),
    "one scale": ({"v_scale": Q["k_scale"]}, "k_scale and v_scale share memory"),
    "scale requires grad": (
        {"k_scale": Q["k_scale"].clone().requires_grad_()}, "k_scale requires grad, but .*inference"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name):
    change, message = BAD[name]
    before = {n: Q[n].clone() for n in INT8_MEMORY}
    with torch.enable_grad(), pytest.raises(RuntimeError, match=message):
        qkv.attention_with_kvcache(**Q | change)
    assert all(torch.equal(Q[n], x) for n, x in before.items())


def test_packed_without_blocks():
    x = torch.zeros(4, 2, 8)
    ends = torch.tensor([0, 4])
    with pytest.raises(RuntimeError, match="k_scale is given, but block_table is None"):
        qkv.varlen_attn(x, x, x, ends, ends, 4, 4, k_scale=torch.ones(1), v_scale=torch.ones(1))


def test_vmap_is_refused():
    call = as_int8(make(2, dtype=torch.float32, L_new=None, lengths=[3, 5]))
    query = call.pop("query")
    with pytest.raises(NotImplementedError, match="vmap: attention_with_kvcache has k_scale"):
        torch.func.vmap(lambda q: qkv.attention_with_kvcache(q, **call))(query[None])


def test_quantize_of_the_reference():
    rows = torch.randn(3, 2, 5, 16)
    ints, scale = quantize(rows)
    assert ((ints * scale.unsqueeze(-1)) - rows).abs().max() <= scale.max() / 2 * 1.001
