"""attention_with_kvcache: appends in place, then attends, as a composition in f64 does."""

import math
import os

import numpy as np
import pytest
import torch
import torch._dynamo.testing
from common import (
    COMPILERS,
    INF,
    as_torch,
    compute_type,
    reference,
    rounds_factors,
)
from forks import run_forked
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import LAYOUTS, lay_out, one_example_in

import qkv
from qkv import testing
from qkv.testing._items import quantize

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
INT = torch.int32


def compare(call):
    expected, dtype = testing.attention_with_kvcache(**call), call["query"].dtype
    output, lse = qkv.attention_with_kvcache(**call, return_softmax_lse=True)
    assert output.dtype == dtype
    assert lse.dtype == compute_type(dtype)
    computed_in = dtype if rounds_factors(dtype) else compute_type(dtype)
    theirs = testing.attention_with_kvcache(**call, dtype=computed_in)
    testing.assert_close(output, expected[0], theirs[0].to(dtype))
    testing.assert_close(lse, expected[1])
    for cache, truth in zip((call["k_cache"], call["v_cache"]), expected[2:], strict=True):
        assert torch.equal(cache.double(), truth)  # new rows where they belong, nothing else
    return output


def make(
    B=2, H=4, Hkv=2, L=1, L_new=1, S=20, D=8, Dv=None, dtype=torch.float64, lengths=None,
    block_size=None,
):  # fmt: skip
    """The arguments of a call; with block_size those of a paged one, whose blocks are in no
    order."""
    Dv = D if Dv is None else Dv
    rows, size = B, S
    call = {"query": torch.randn(B, H, L, D)}
    if block_size:
        columns = -(-S // block_size)
        rows, size = B * columns + 2, block_size
        call["block_table"] = torch.randperm(rows)[: B * columns].view(B, columns).to(INT)
    call |= {
        "k_cache": torch.randn(rows, Hkv, size, D),
        "v_cache": torch.randn(rows, Hkv, size, Dv),
    }
    if L_new is not None:
        call |= {"key": torch.randn(B, Hkv, L_new, D), "value": torch.randn(B, Hkv, L_new, Dv)}
        lengths = [3 * b for b in range(B)] if lengths is None else lengths
    call = {n: x.to(dtype) if x.is_floating_point() else x for n, x in call.items()}
    if lengths is not None:
        call["cache_seqlens"] = torch.tensor(lengths, dtype=INT)
    return call


@st.composite
def calls(draw):
    torch.manual_seed(draw(st.integers(0, 1000)))
    B, L = draw(st.integers(0, 4)), draw(st.sampled_from([1, 1, 2, 5, 17, 0]))
    Hkv, group = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    S, D = draw(st.integers(1, 40)), draw(st.sampled_from([8, 16, 1, 5]))
    L_new = draw(st.sampled_from([None, 1, L, 0, 4]))
    kind = draw(st.sampled_from(["rows", "chosen rows", "blocks", "blocks"]))
    L_new = None if L_new is None else min(L_new, S)
    lengths = None
    if L_new is not None or draw(st.booleans()):
        lengths = [draw(st.integers(0, S - (L_new or 0))) for _ in range(B)]
    dtype = draw(st.sampled_from(DTYPES))
    call = make(
        B, Hkv * group, Hkv, L, L_new, S, D, draw(st.sampled_from([D, 3, 16])), dtype, lengths,
        draw(st.integers(1, 9)) if kind == "blocks" else None,
    )  # fmt: skip
    if kind != "blocks":
        if draw(st.booleans()):
            most = lengths or [S] * B
            call["cache_leftpad"] = torch.tensor([draw(st.integers(0, n)) for n in most], dtype=INT)
        if kind == "chosen rows":
            call["cache_batch_idx"] = torch.randperm(B + 2)[:B]
            for name in ("k_cache", "v_cache"):
                call[name] = torch.randn(B + 2, *call[name].shape[1:]).to(dtype)
    elif call["block_table"].numel() and lengths and draw(st.booleans()):
        needed = -(-(lengths[0] + (L_new or 0)) // call["k_cache"].size(2))
        call["block_table"][0, needed:] = -7  # entries that are not looked at
    layouts = st.sampled_from(LAYOUTS)
    for name in ("query", "k_cache", "v_cache", "key", "value"):
        if name in call:
            call[name] = lay_out(call[name], draw(layouts))
    for name in ("cache_seqlens", "block_table", "cache_leftpad", "cache_batch_idx"):
        if name in call and draw(st.booleans()):
            x = call[name].to(draw(st.sampled_from([INT, torch.int64])))
            call[name] = torch.stack([x, x - 1000], -1)[..., 0]
    for name in ("alibi_slopes", "sinks"):
        lead = draw(st.sampled_from([None, (), (B,)]))
        if lead is not None:
            call[name] = torch.rand(*lead, Hkv * group)
    sides = st.sampled_from([-1, -1, 0, 3, 2**40])
    return call | {
        "causal": draw(st.booleans()),
        "window_size": draw(st.one_of(st.none(), st.tuples(sides, sides))),
        "softcap": draw(st.sampled_from([0.0, 0.0, 2.0])),
        "softmax_scale": draw(st.sampled_from([None, None, 0.3])),
    }


def tables(places, pairs, dtype=torch.float64):
    """cos and sin of angles that are no multiples of each other."""
    angles = torch.outer(torch.arange(float(places)), 1.7 ** -torch.arange(float(pairs)))
    return angles.cos().to(dtype), angles.sin().to(dtype)


@st.composite
def rotated_calls(draw):
    call = draw(calls().filter(lambda call: "key" in call))
    most = int(call["cache_seqlens"].max()) if len(call["query"]) else 0
    places = most + max(call["key"].size(2), call["query"].size(2))
    pairs = draw(st.integers(0, call["query"].size(-1) // 2))
    dtype = draw(st.sampled_from([call["query"].dtype, torch.float32]))
    if call["query"].dtype == torch.float64:
        dtype = torch.float64
    cos, sin = tables(places + draw(st.integers(0, 3)), pairs, dtype)
    interleaved = draw(st.booleans())
    return call | {"rotary_cos": cos, "rotary_sin": sin, "rotary_interleaved": interleaved}


def rotated_before(call):
    """The call without rotation, of what qkv.rotate makes of query and key."""
    plain = {name: x for name, x in call.items() if not name.startswith("rotary")}
    window = call["window_size"] or (-1, -1)
    moves = call["causal"] or max(window) >= 0
    for name, step in (("query", int(moves)), ("key", 1)):
        x = call[name]
        steps = step * torch.arange(x.size(2))
        places = call["cache_seqlens"].long().unsqueeze(1) + steps  # [B, L]
        cos, sin = call["rotary_cos"][places], call["rotary_sin"][places]
        plain[name] = qkv.rotate(x, x, cos, sin, interleaved=call["rotary_interleaved"])[0]
    return plain


@pytest.mark.usefixtures("isa")
class TestRotary:
    @pytest.mark.bf16
    @settings(max_examples=one_example_in(2))
    @given(rotated_calls())
    def test_as_rotated_before(self, call):
        plain = rotated_before(call)
        for name in ("k_cache", "v_cache"):  # a copy without gaps might go another way
            old = call[name]
            plain[name] = old.new_empty_strided(old.shape, old.stride()).copy_(old)
        key = call["key"].clone()
        expected = qkv.attention_with_kvcache(**plain, return_softmax_lse=True)
        found = qkv.attention_with_kvcache(**call, return_softmax_lse=True)
        for ours, theirs in zip(found, expected, strict=True):
            assert torch.equal(ours, theirs)
        for name in ("k_cache", "v_cache"):
            assert torch.equal(call[name], plain[name])
        assert torch.equal(call["key"], key)  # which is the caller's

    @pytest.mark.parametrize("causal", [True, False])
    @pytest.mark.parametrize("block_size", [None, 4])
    def test_against_composition(self, causal, block_size):
        call = make(L=3, L_new=3, block_size=block_size) | {"causal": causal}
        call |= dict(zip(("rotary_cos", "rotary_sin"), tables(20, 3), strict=True))
        expected = testing.attention_with_kvcache(**call)
        output = qkv.attention_with_kvcache(**call)
        torch.testing.assert_close(output, expected[0])
        torch.testing.assert_close(call["k_cache"], expected[2])

    def test_int8_caches(self):
        call = make(L=2, L_new=2, dtype=torch.float32) | {"causal": True, "window_size": None}
        for name, short in (("k_cache", "k_scale"), ("v_cache", "v_scale")):
            call[name], call[short] = quantize(call[name])
        cos, sin = tables(20, 4, torch.float32)
        call |= {"rotary_cos": cos, "rotary_sin": sin, "rotary_interleaved": False}
        plain = rotated_before(call)
        names = ("k_cache", "v_cache", "k_scale", "v_scale")
        plain |= {name: call[name].clone() for name in names}
        assert torch.equal(qkv.attention_with_kvcache(**call), qkv.attention_with_kvcache(**plain))
        for name in names:
            assert torch.equal(call[name], plain[name])

    @pytest.mark.parametrize("causal", [True, False])
    def test_nothing_to_rotate_takes_tables_without_a_row(self, causal):
        call = make(3, L=0, L_new=0, lengths=[0] * 3) | {"causal": causal, "window_size": None}
        call |= dict(zip(("rotary_cos", "rotary_sin"), tables(0, 4), strict=True))
        assert qkv.attention_with_kvcache(**call).shape == (3, 4, 0, 8)

    def test_default_is_flash_attentions(self):
        call = make(L=1) | dict(zip(("rotary_cos", "rotary_sin"), tables(20, 4), strict=True))
        both = [call | {"k_cache": call["k_cache"].clone(), **more} for more in (
            {}, {"rotary_interleaved": True})]  # fmt: skip
        assert torch.equal(*(qkv.attention_with_kvcache(**call) for call in both))


@pytest.mark.usefixtures("isa")
class TestAgainstComposition:
    @pytest.mark.bf16
    @settings(max_examples=one_example_in(2))
    @given(calls())
    def test_drawn(self, call):
        compare(call)

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("block_size", [None, 16, 128])
    @pytest.mark.parametrize("L, group", [(1, 1), (1, 8), (16, 2), (70, 1)])
    def test_long(self, L, group, block_size, dtype):
        """So many keys that they are split over the cores, and the parts merged."""
        call = make(
            2, 2 * group, 2, L, L, 1500, 64, dtype=dtype, lengths=[1400, 600], block_size=block_size
        )
        compare(call | {"causal": True})

    @pytest.mark.parametrize("block_size", [None, 4])
    def test_rows_without_keys(self, block_size):
        call = make(3, L_new=None, lengths=[0, 5, 0], block_size=block_size)
        output, lse = qkv.attention_with_kvcache(**call, return_softmax_lse=True)
        assert (output[::2] == 0).all() and (lse[::2] == -INF).all() and lse[1].isfinite().all()
        sinks = torch.tensor([1.0, 2, 3, 4])
        output, lse = qkv.attention_with_kvcache(**call, sinks=sinks, return_softmax_lse=True)
        assert (output[::2] == 0).all()
        torch.testing.assert_close(lse[0, :, 0], sinks.double())

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("block_size", [None, 16])
    def test_decoding_is_causal_attention(self, block_size, dtype):
        B, H, Hkv, steps, D = 2, 4, 2, 50, 16
        query = torch.randn(B, H, steps, D).to(dtype)
        key, value = (torch.randn(B, Hkv, steps, D).to(dtype) for _ in range(2))
        call = make(B, H, Hkv, L_new=None, S=steps, D=D, dtype=dtype, block_size=block_size)
        outputs = []
        for n in range(steps):
            step = {"query": query[:, :, n : n + 1]}
            step |= {"key": key[:, :, n : n + 1], "value": value[:, :, n : n + 1]}
            outputs.append(qkv.attention_with_kvcache(**call | step, cache_seqlens=n, causal=True))
        options = {"is_causal": True, "enable_gqa": True}
        theirs, truth = (f(query, key, value, **options)[0] for f in (as_torch(dtype), reference))
        testing.assert_close(torch.cat(outputs, 2), truth, theirs)


def test_flash_attention_layout():
    """[B, S, H, D] caches and [B, L, H, D] tensors, seen through transpose(1, 2)."""
    call = make(2, L=3, L_new=3, dtype=torch.float32)
    flash = {n: x.transpose(1, 2).contiguous() for n, x in call.items() if x.dim() == 4}
    seen = call | {n: x.transpose(1, 2) for n, x in flash.items()}
    output = compare(seen | {"causal": True})
    assert output.transpose(1, 2).is_contiguous()
    qkv.attention_with_kvcache(**call)
    assert torch.equal(flash["k_cache"].transpose(1, 2), call["k_cache"])


def test_one_length_for_all():
    call = make(3, lengths=[7, 7, 7])
    copy = call | {n: call[n].clone() for n in ("k_cache", "v_cache")}
    expected = qkv.attention_with_kvcache(**call)
    for one in (7, np.int64(7)):
        assert torch.equal(qkv.attention_with_kvcache(**copy | {"cache_seqlens": one}), expected)
    assert torch.equal(copy["k_cache"], call["k_cache"])
    assert torch.equal(qkv.attention_with_kvcache(**copy, num_splits=4, window_size=None), expected)


def test_key_and_value_in_one_cache():
    """A key cache and a value cache side by side in one tensor, in any dimension, share no
    memory."""
    for dim in range(5):
        call = make(2, S=20, D=8)
        kv = torch.stack([call["k_cache"], call["v_cache"]], dim)
        call["k_cache"], call["v_cache"] = kv.unbind(dim)
        compare(call)
    call = make(2, S=20, D=8, Dv=4)
    kv = torch.cat([call["k_cache"], call["v_cache"]], -1)
    call["k_cache"], call["v_cache"] = kv.split([8, 4], -1)
    compare(call)


def test_reading_alone_takes_caches_that_share_memory():
    call = make(3, Hkv=1, L_new=None, lengths=[4, 20, 9])
    call["k_cache"] = call["v_cache"] = call["k_cache"][:1].expand(3, -1, -1, -1)
    compare(call)
    call["cache_batch_idx"] = torch.tensor([2, 2, 0])
    compare(call)


@pytest.mark.parametrize("names", [["k_cache"], ["v_cache", "key"], ["query", "value"]])
@pytest.mark.parametrize("dtype", DTYPES)
def test_foreign_memory_between_elements(names, dtype):
    """Tensors from frombuffer may begin at any byte; the cache in that memory is written to."""
    call = make(2, L=3, L_new=2, dtype=dtype)
    for name in names:
        x = call[name]
        memory = bytearray(x.numel() * x.element_size() + 1)
        call[name] = torch.frombuffer(memory, dtype=dtype, offset=1).view(x.shape).copy_(x)
        assert call[name].data_ptr() % 2 == 1
    compare(call)


def test_lazy_clones_part():
    """A lazy clone (torch's copy-on-write) shares its memory until someone writes; the append
    does."""
    call = make(2)
    call["v_cache"] = call["k_cache"]._lazy_clone()
    compare(call)
    assert not torch.equal(call["k_cache"], call["v_cache"])


def test_a_block_may_be_read_by_many():
    """Batch items with a common prompt share its blocks."""
    call = make(2, S=12, lengths=[9, 10], block_size=4)
    call["block_table"][1, :2] = call["block_table"][0, :2]
    compare(call)


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("dtype", [*DTYPES, torch.int8])
@pytest.mark.parametrize("block_size", [None, 1, 16])
@pytest.mark.parametrize("D", [33, 34, 64])
def test_values_that_begin_keys(D, block_size, dtype):
    """Values that are a part of their keys' rows have the bits of values of their own, and so has
    the output; D of one number more than values, and rows that begin anywhere."""
    call = make(2, H=20, Hkv=1, L_new=None, S=150, D=D, lengths=[150, 93], block_size=block_size)
    call["query"] = call["query"].to(torch.float32 if dtype == torch.int8 else dtype)
    if dtype == torch.int8:
        call["k_cache"], call["k_scale"] = call["v_cache"], call["v_scale"] = quantize(
            call["k_cache"]
        )
    call["k_cache"] = call["k_cache"].to(dtype)
    for Dv in (D, D - 1, 20):
        call["v_cache"] = call["k_cache"][..., :Dv]
        output = qkv.attention_with_kvcache(**call)
        call["v_cache"] = call["v_cache"].clone()
        assert torch.equal(qkv.attention_with_kvcache(**call), output)


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", [None, 16])
def test_same_bits_for_any_threads_and_batch(threads, block_size, dtype):
    lengths = [1100, 30, 0]
    call = make(3, L=2, L_new=2, S=1200, D=32, dtype=dtype, lengths=lengths, block_size=block_size)
    threads(1)
    expected = qkv.attention_with_kvcache(**call)
    for n in (2, 4):
        threads(n)
        assert torch.equal(qkv.attention_with_kvcache(**call), expected)
    for b in range(3):
        alone = {n: x if block_size and "cache" in n[:7] else x[b : b + 1] for n, x in call.items()}
        alone["cache_seqlens"] = lengths[b]
        assert torch.equal(qkv.attention_with_kvcache(**alone), expected[b : b + 1])


Q = make(2, dtype=torch.float32)
PAGED = make(2, dtype=torch.float32, block_size=4)  # 5 blocks each, of 12
ROTARY = {"rotary_cos": torch.ones(30, 4), "rotary_sin": torch.ones(30, 4)}
OVER = torch.zeros(1, 2, 20, 8).expand(2, -1, -1, -1)
BOTH = torch.randn(2, 2, 20, 8)
SLIDING = torch.zeros(400).as_strided((2, 2, 20, 8), (170, 85, 4, 1))  # rows overlap


def idx(*numbers, dtype=INT):
    return torch.tensor(numbers, dtype=dtype)


def table(**entries):
    t = PAGED["block_table"].clone()
    for place, block in entries.items():
        t[int(place[1]), int(place[2])] = block
    return t


FIRST = int(PAGED["block_table"][0, 0])
BAD = {
    "query 3-D": (Q, {"query": torch.zeros(2, 4, 8)}, r"query has the shape \[2, 4, 8\].*4 dim"),
    "k_cache 3-D": (Q, {"k_cache": torch.zeros(2, 20, 8)}, r"k_cache has the shape.*4 dim"),
    "v_cache 5-D": (Q, {"v_cache": torch.zeros(1, 2, 2, 20, 8)}, r"v_cache has the shape.*4 dim"),
    "head_dim": (Q, {"k_cache": torch.zeros(2, 2, 20, 7)}, r"k_cache has .*\[2, 2, 20, 8\]"),
    "v_cache rows": (Q, {"v_cache": torch.zeros(2, 2, 19, 8)}, r"v_cache has .*\[2, 2, 20, 8\]"),
    "v_cache heads": (Q, {"v_cache": torch.zeros(2, 1, 20, 8)}, r"v_cache has .*\[2, 2, 20, 8\]"),
    "heads": (Q, {"query": torch.zeros(2, 3, 1, 8)}, "k_cache has 2 heads and query 3.*divide"),
    "batch": (Q, {"query": torch.zeros(3, 4, 1, 8)}, "k_cache has 2 rows and query 3"),
    "key": (Q, {"key": torch.zeros(2, 2, 1, 7)}, r"key has the shape.*\[2, 2, 1, 8\]"),
    "key heads": (Q, {"key": torch.zeros(2, 4, 1, 8)}, r"key has the shape.*\[2, 2, 1, 8\]"),
    "value": (Q, {"value": torch.zeros(2, 2, 2, 8)}, r"value has the shape.*\[2, 2, 1, 8\]"),
    "key 3-D": (Q, {"key": torch.zeros(2, 1, 8)}, "key has the shape.*4 dim"),
    "key alone": (Q, {"value": None}, "key is given, but value is None"),
    "value alone": (Q, {"key": None}, "value is given, but key is None"),
    "no lengths": (Q, {"cache_seqlens": None}, "key is given, but cache_seqlens is None"),
    "dtype": (Q, {"query": torch.zeros(2, 4, 1, 8).half()}, "k_cache is float32.*query is float16"),
    "v_cache dtype": (Q, {"v_cache": Q["v_cache"].double()}, "v_cache is float64.*query"),
    "key dtype": (Q, {"key": Q["key"].half()}, "key is float16, but query is float32"),
    "value dtype": (Q, {"value": Q["value"].double()}, "value is float64, but query is float32"),
    "int dtype": (Q, {n: Q[n].int() for n in Q}, "query is int32"),
    "device": (Q, {"k_cache": Q["k_cache"].to("meta")}, "k_cache is on meta"),
    "key device": (Q, {"key": Q["key"].to("meta")}, "key is on meta"),
    "sparse": (Q, {"value": Q["value"].to_sparse()}, "value has the layout"),
    "too long": (Q, {"cache_seqlens": idx(3, 20)}, r"cache_seqlens\[1\] is 20.*room for 20"),
    "one too long": (Q, {"cache_seqlens": 20}, r"cache_seqlens\[0\] is 20.*room for 20"),
    "huge": (Q, {"cache_seqlens": idx(3, 2**63 - 1, dtype=torch.int64)}, r"seqlens\[1\] is 9"),
    "negative": (Q, {"cache_seqlens": idx(-1, 3)}, r"cache_seqlens\[0\] is -1"),
    "longer key": (
        Q, {"key": torch.zeros(2, 2, 30, 8), "value": torch.zeros(2, 2, 30, 8)}, "has 30 rows",
    ),
    "too long to read": (
        Q, {"key": None, "value": None, "cache_seqlens": idx(3, 21)}, r"cache_seqlens\[1\] is 21",
    ),
    "lengths shape": (Q, {"cache_seqlens": idx(3)}, r"cache_seqlens has the shape \[1\].*\[2\]"),
    "lengths dtype": (Q, {"cache_seqlens": torch.ones(2)}, "cache_seqlens is float32.*int32 or"),
    "lengths device": (Q, {"cache_seqlens": idx(3, 3).to("meta")}, "cache_seqlens is on meta"),
    "cos without sin": (Q, {"rotary_cos": torch.ones(9, 4)}, "but rotary_sin is None"),
    "sin without cos": (Q, {"rotary_sin": torch.ones(9, 4)}, "but rotary_cos is None"),
    "rotary without key": (
        Q, {"key": None, "value": None, **ROTARY}, "rotary_cos is given, but key is None",
    ),
    "rotary rows": (
        Q, {"rotary_cos": torch.ones(3, 4), "rotary_sin": torch.ones(3, 4)},
        r"rotary_cos has 3 rows, but 4 are expected: batch item 1 has 3 keys",
    ),
    "rotary width": (
        Q, {"rotary_cos": torch.ones(30, 5), "rotary_sin": torch.ones(30, 5)},
        r"rotary_cos has the shape \[30, 5\], but no more than D / 2 pairs",
    ),
    "rotary shapes": (
        Q, {**ROTARY, "rotary_sin": torch.ones(30, 3)}, r"rotary_sin has the shape \[30, 3\], but",
    ),
    "rotary 1-D": (
        Q, {"rotary_cos": torch.ones(4), "rotary_sin": torch.ones(4)}, "2 dimensions are expected",
    ),
    "rotary dtype": (
        Q, {"rotary_cos": torch.ones(30, 4).half(), "rotary_sin": torch.ones(30, 4).half()},
        "rotary_cos is float16",
    ),
    "row": (Q, {"cache_batch_idx": idx(0, 2)}, r"batch_idx\[1\] is 2, but k_cache has 2 rows"),
    "negative row": (Q, {"cache_batch_idx": idx(-1, 1)}, r"cache_batch_idx\[0\] is -1"),
    "row twice": (Q, {"cache_batch_idx": idx(1, 1)}, "cache_batch_idx has 1 more than once"),
    "rows shape": (Q, {"cache_batch_idx": idx(0, 1, 0)}, r"cache_batch_idx has the shape \[3\]"),
    "rows dtype": (Q, {"cache_batch_idx": idx(0, 1).short()}, "cache_batch_idx is int16"),
    "leftpad": (Q, {"cache_leftpad": idx(0, 4)}, r"leftpad\[1\] is 4.*cache_seqlens\[1\] = 3"),
    "negative leftpad": (Q, {"cache_leftpad": idx(0, -1)}, r"cache_leftpad\[1\] is -1"),
    "leftpad shape": (Q, {"cache_leftpad": idx(0)}, r"cache_leftpad has the shape \[1\]"),
    "table and rows": (PAGED, {"cache_batch_idx": idx(0, 1)}, "cache_batch_idx and block_table"),
    "table and leftpad": (PAGED, {"cache_leftpad": idx(0, 1)}, "cache_leftpad and block_table"),
    "table 1-D": (PAGED, {"block_table": idx(0, 1)}, r"block_table has the shape \[2\].*2 dim"),
    "table rows": (PAGED, {"block_table": idx([0, 1])}, r"block_table has the shape \[1, 2\]"),
    "table dtype": (PAGED, {"block_table": table().float()}, "block_table is float32"),
    "block": (PAGED, {"block_table": table(b10=12)}, r"block_table\[1, 0\] is 12.*12 blocks"),
    "negative block": (PAGED, {"block_table": table(b00=-1)}, r"block_table\[0, 0\] is -1"),
    "huge block": (
        PAGED, {"block_table": table().long() + 2**32}, r"block_table\[0, 0\] is 42949.*12 blocks",
    ),
    "table too short": (
        PAGED, {"block_table": table()[:, :1], "cache_seqlens": idx(3, 4)},
        r"cache_seqlens\[1\] is 4 and key has 1 rows, but.*block_table have room for 4",
    ),
    "no block": (PAGED, {"block_table": table()[:, :0]}, "have room for 0"),
    "same slot": (
        PAGED, {"block_table": table(b10=FIRST), "cache_seqlens": idx(3, 3)},
        f"batch items 0 and 1 write to the same row, 3 of block {FIRST}",
    ),
    "same slot in one row": (
        PAGED,
        {"block_table": table(b01=FIRST), "key": torch.zeros(2, 2, 7, 8),
         "value": torch.zeros(2, 2, 7, 8)},
        f"batch items 0 and 0 write to the same row, 0 of block {FIRST}",
    ),
    "empty blocks": (
        PAGED, {n: torch.zeros(12, 2, 0, 8) for n in ("k_cache", "v_cache")}, "at least 1 row",
    ),
    "expanded k_cache": (Q, {"k_cache": OVER}, "k_cache, with the strides.*clone"),
    "sliding v_cache": (Q, {"v_cache": SLIDING}, "v_cache, with the strides.*clone"),
    "one cache": (Q, {"k_cache": BOTH, "v_cache": BOTH}, "k_cache and v_cache share memory"),
    "caches that overlap": (
        Q,
        {"k_cache": torch.zeros(2, 2, 21, 8)[:, :, 1:], "v_cache": None},
        "k_cache and v_cache share memory",
    ),
    "key in k_cache": (Q, {"k_cache": BOTH, "key": BOTH[:, :, 4:5]}, "key shares memory with k_ca"),
    "value in k_cache": (Q, {"k_cache": BOTH, "value": BOTH[:, :, :1]}, "value shares memory"),
    "query in v_cache": (
        Q, {"v_cache": BOTH, "query": BOTH.view(2, 4, 10, 8)}, "query shares memory with v_cache",
    ),
    "negated k_cache": (Q, {"k_cache": torch._neg_view(Q["k_cache"])}, "k_cache .*is_neg.*resolve"),
    "negated v_cache": (Q, {"v_cache": torch._neg_view(Q["v_cache"])}, "v_cache .*is_neg.*resolve"),
    "scale": (Q, {"softmax_scale": math.nan}, "softmax_scale is nan"),
    "window": (Q, {"window_size": (-2, 0)}, r"window_size is \(-2, 0\)"),
    "softcap": (Q, {"softcap": -1.0}, "softcap is -1"),
    "slopes": (Q, {"alibi_slopes": torch.zeros(3)}, r"alibi_slopes has the shape \[3\].*\[2, 4\]"),
    "sinks": (Q, {"sinks": torch.zeros(3, 4)}, r"sinks has the shape \[3, 4\].*\[2, 4\]"),
    "sinks dtype": (Q, {"sinks": idx(1, 2, 3, 4)}, "sinks is int32"),
    "spans": (Q, {"spans": idx(5, 2).view(1, 2)}, "the span 0 from 5 to 2"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_call(name):
    """Nothing has been written when the error comes."""
    good, change, message = BAD[name]
    call = good | change
    if name == "caches that overlap":
        call["v_cache"] = call["k_cache"]._base[:, :, :-1]
    caches = [x for x in (call["k_cache"], call["v_cache"]) if not x.is_meta]
    before = [x.clone() for x in caches]
    with pytest.raises((RuntimeError, ValueError), match=message):
        qkv.attention_with_kvcache(**call)
    assert all(torch.equal(x, y) for x, y in zip(caches, before, strict=True))


NEGATED = ["query", "key", "value", "sinks", "cache_seqlens"]


@pytest.mark.parametrize("names", [*[[n] for n in NEGATED], NEGATED], ids="+".join)
def test_what_is_read_may_be_negated(names):
    """A tensor with Tensor.is_neg() has numbers in memory that are to be read with the other
    sign."""
    call = make(2) | {"sinks": torch.randn(4)}
    compare(call | {n: torch._neg_view(-call[n]) for n in names})


def test_caches_that_are_only_read_may_be_negated():
    call = make(2) | {"key": None, "value": None}
    compare(call | {n: torch._neg_view(-call[n]) for n in ("k_cache", "v_cache")})


class TestInferenceOnly:
    @pytest.mark.parametrize("name", ["query", "k_cache", "v_cache", "key", "value", "sinks"])
    def test_refuses_gradients(self, name):
        call = make(2) | {"sinks": torch.zeros(4)}
        before = call["k_cache"].clone()
        call[name] = call[name].clone().requires_grad_()
        with pytest.raises(RuntimeError, match=f"{name} requires grad.*no_grad"):
            qkv.attention_with_kvcache(**call)
        assert torch.equal(call["k_cache"], before)
        with torch.no_grad():
            assert not compare(call).requires_grad

    def test_refuses_tangents(self):
        call = make(2)
        with torch.autograd.forward_ad.dual_level():
            call["key"] = torch.autograd.forward_ad.make_dual(call["key"], call["key"])
            with pytest.raises(NotImplementedError, match="forward-mode"):
                qkv.attention_with_kvcache(**call)

    def test_inference_mode(self):
        with torch.inference_mode():
            compare(make(2))
        call = make(2)
        before = call["k_cache"]._version
        with torch.inference_mode():
            compare(call)
        assert call["k_cache"]._version == before + 1

    @pytest.mark.parametrize("outside", ["key", "cache_seqlens"])
    def test_in_inference_mode_tensors_from_outside_go_with_caches_from_within(self, outside):
        """As weights of a model and tables of a rotation are."""
        call = make(2)
        with torch.inference_mode():
            compare({n: x if n == outside else x.clone() for n, x in call.items()})

    def test_caches_made_in_inference_mode_are_refused_outside_of_it(self):
        """As torch refuses to write to them; before anything is written."""
        with torch.inference_mode():
            call = make(2)
            before = call["k_cache"].clone()
        call["query"] = call["query"].clone()
        with pytest.raises(RuntimeError, match="k_cache was made in inference mode.*clone"):
            qkv.attention_with_kvcache(**call)
        assert torch.equal(call["k_cache"], before)
        compare(call | {"key": None, "value": None})

    def test_tells_autograd_of_the_change(self):
        call = make(2)
        weight = torch.ones(8, dtype=torch.float64, requires_grad=True)
        product = (call["k_cache"] * weight).sum()
        reading = call | {"key": None, "value": None}
        qkv.attention_with_kvcache(**reading)
        torch.autograd.grad(product, weight, retain_graph=True)
        qkv.attention_with_kvcache(**call)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.grad(product, weight)


class TestAutocast:
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_casts_all_but_the_caches(self, dtype):
        call = make(2, dtype=torch.float32)
        caches = {n: call[n].to(dtype) for n in ("k_cache", "v_cache")}
        half = {n: x.to(dtype) if x.is_floating_point() else x for n, x in call.items()}
        expected = qkv.attention_with_kvcache(**half)
        with torch.autocast("cpu", dtype=dtype):
            output = qkv.attention_with_kvcache(**call | caches)
        assert output.dtype == dtype and torch.equal(output, expected)
        assert torch.equal(caches["k_cache"], half["k_cache"])

    def test_other_caches_are_an_error(self):
        call = make(2, dtype=torch.float32)
        message = "k_cache is float32, but autocast makes query bfloat16"
        with (
            torch.autocast("cpu", dtype=torch.bfloat16),
            pytest.raises(RuntimeError, match=message),
        ):
            qkv.attention_with_kvcache(**call)

    def test_float64_stays(self):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            compare(make(2))


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
@pytest.mark.usefixtures("nothing_compiled")
class TestCompile:
    @pytest.mark.one_in(2)
    @pytest.mark.parametrize("backend", COMPILERS)
    @pytest.mark.parametrize("block_size", [None, 16])
    def test_decoding(self, backend, block_size):
        """One graph serves all lengths; the caches change inside and outside of it."""

        def step(query, key, value, call, n):
            call = call | {"query": query * 2, "key": key.sin(), "value": value}
            output = qkv.attention_with_kvcache(**call, cache_seqlens=n, causal=True)
            return output.cos(), call["k_cache"].sum()

        counter = torch._dynamo.testing.CompileCounterWithBackend(backend)
        compiled = torch.compile(step, backend=counter, fullgraph=True, dynamic=True)
        call = make(2, L_new=None, S=32, dtype=torch.float32, block_size=block_size)
        twin = {n: x.clone() for n, x in call.items()}
        at, graphs = 0, set()
        for L in (7, 3, 2, 5):
            new = torch.randn(2, 4, L, 8), *torch.randn(2, 2, 2, L, 8)
            n = torch.full((2,), at)
            torch.testing.assert_close(compiled(*new, call, n), step(*new, twin, n))
            for name in ("k_cache", "v_cache"):
                torch.testing.assert_close(call[name], twin[name])
            at += L
            graphs.add(counter.frame_count)
        assert len(graphs) == 1  # none after the first call

    def test_length_as_a_number(self):
        def step(call, n):
            return qkv.attention_with_kvcache(**call, cache_seqlens=n)

        counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
        compiled = torch.compile(step, backend=counter, fullgraph=True)
        call = make(2)
        del call["cache_seqlens"]
        for n in range(4, 10):
            torch.testing.assert_close(compiled(call, n), step(call, n))
        assert counter.frame_count <= 2  # the second one for any number

    def test_caches_made_inside(self):
        def f(query, key):
            cache = torch.zeros(2, 2, 2, 9, 8, dtype=query.dtype)
            output = qkv.attention_with_kvcache(query, *cache, key, key, cache_seqlens=3)
            return output, cache

        call = make(2)
        compiled = torch.compile(f, backend="aot_eager", fullgraph=True)
        args = call["query"], call["key"]
        torch.testing.assert_close(compiled(*args), f(*args))

    def test_export(self):
        class Model(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.register_buffer("k_cache", torch.zeros(1, 2, 20, 8))
                self.register_buffer("v_cache", torch.zeros(1, 2, 20, 8))

            def forward(self, x, lengths):
                return qkv.attention_with_kvcache(
                    x, self.k_cache, self.v_cache, x, x, cache_seqlens=lengths
                )

        x, lengths = torch.randn(1, 2, 3, 8), torch.tensor([4])
        model = Model()
        program = torch.export.export(model, (x, lengths)).module()
        with torch.no_grad():
            torch.testing.assert_close(program(x, lengths), model(x, lengths))
        assert torch.equal(program.k_cache, model.k_cache) and (model.k_cache[:, :, 4:7] == x).all()

    def test_meta(self):
        call = {n: x.to("meta") for n, x in make(2, L=3, Dv=5, dtype=torch.bfloat16).items()}
        for lengths in (call["cache_seqlens"], 4):
            call["cache_seqlens"] = lengths
            output, lse = qkv.attention_with_kvcache(**call, return_softmax_lse=True)
            assert (output.shape, output.dtype) == ((2, 4, 3, 5), torch.bfloat16)
            assert (lse.shape, lse.dtype) == ((2, 4, 3), torch.float32)


def test_overlap_by_brute_force():
    """Caches are refused exactly where two of their elements have one place in memory."""
    generator = torch.Generator().manual_seed(5)

    def draw(low, high):
        return int(torch.randint(low, high, (), generator=generator))

    seen = set()
    for _ in range(400):
        B, Hkv, S, D = (draw(1, 4) for _ in range(4))
        base = torch.zeros(200)
        shape = (B, Hkv, S, D)
        k, v = (
            base.as_strided(shape, [draw(0, 17) for _ in range(4)], draw(0, 40)) for _ in range(2)
        )
        places = [
            torch.arange(200).as_strided(x.shape, x.stride(), x.storage_offset()).flatten().tolist()
            for x in (k, v)
        ]
        bad = len(set(places[0] + places[1])) < len(places[0]) + len(places[1])
        new = torch.zeros(B, Hkv, 1, D)
        try:
            qkv.attention_with_kvcache(torch.zeros(B, Hkv, 1, D), k, v, new, new, cache_seqlens=0)
            refused = False
        except RuntimeError as error:
            assert "memory" in str(error)
            refused = True
        assert refused == bad, (shape, k.stride(), v.stride(), k.storage_offset())
        seen.add(bad)
    assert seen == {True, False}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_large_append_after_fork():
    """libgomp's threads do not survive a fork: the child must not wait for them."""
    run_forked(
        "import os, torch, qkv\n"
        "torch.set_num_threads(4)\n"
        "kv, new = torch.zeros(2, 2, 4, 8, 600, 64), torch.randn(4, 8, 500, 64)\n"
        "step = lambda n: qkv.attention_with_kvcache(\n"
        "    new[:, :, :1], *kv[n], new, new, cache_seqlens=3)\n"
        "output = step(0)\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    os._exit(0 if torch.equal(step(1), output) else 1)\n"
        "assert os.waitpid(child, 0)[1] == 0\n"
    )
