"""qkv.block_mask has the lists of torch's create_block_mask, and evaluates few pairs."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import and_masks, create_block_mask, or_masks

import qkv

LISTS = [
    f"{full}{side}_{what}"
    for full in ("", "full_")
    for side in ("kv", "q")
    for what in ("num_blocks", "indices")
]
B, H, L, S = 2, 3, 101, 150
LONG = 16384

IDS = torch.arange(160) // 37
SMALL_IDS = (torch.arange(160) // 37).to(torch.int8)
LENGTHS = torch.tensor([40, 150])
WIDTHS = torch.tensor([3, 20, 100], dtype=torch.int32)
PER_ITEM = torch.stack([IDS, torch.arange(160) // 50])
BLOCKS = torch.arange(100).view(10, 10) % 3 == 0
PAIRS = torch.arange(160 * 160).view(160, 160) % 3 > 0
OFFSET = torch.tensor(5)
HALF = torch.tensor(70.5)
DISTANCES = torch.arange(300) % 140 > 20


def causal(b, h, q, k):
    return q >= k


def window(b, h, q, k):
    return (q - k).abs() <= 20


def documents(b, h, q, k):
    return (IDS[q] == IDS[k]) & (q >= k)


def neighbourhood(b, h, q, k):
    """5 x 5 points around each of a grid with rows of 12, which do not leave it."""
    y, x = torch.clamp(q // 12, 2, 9), torch.clamp(q % 12, 2, 9)
    return ((k // 12 - y).abs() <= 2) & ((k % 12 - x).abs() <= 2)


def in_place(b, h, q, k):
    seen = q >= k
    seen &= IDS[q] == IDS[k]
    place = q.clone()
    place += 1
    return seen | (place == k)


def in_place_of_view(b, h, q, k):
    seen = q + k + b + h > 30
    view = seen.view(())
    seen &= q > k
    return view


def in_place_of_filled(b, h, q, k):
    """torch.vmap takes that where nothing is written that has more dimensions."""
    seen = torch.ones_like(q + k + b + h)
    view = seen.view(())
    seen *= q // 40
    return view > k // 20


def of_bool_arithmetic(b, h, q, k):
    return ((q > 30).long() * 40 + (k < 9) * 7 - (q == k).int()) > 6


MASKS = {
    "causal": causal,
    "window": window,
    "documents": documents,
    "small documents": lambda b, h, q, k: SMALL_IDS[q] == SMALL_IDS[k],
    "small documents and a large number": lambda b, h, q, k: SMALL_IDS[q] > -1,
    "small documents and a number beyond them": lambda b, h, q, k: SMALL_IDS[q] < 1000,
    "documents of each item": lambda b, h, q, k: PER_ITEM[b, q] == PER_ITEM[b, k],
    "prefix": lambda b, h, q, k: k < LENGTHS[b],
    "window of each head": lambda b, h, q, k: (q - k).abs() < WIDTHS[h],
    "item and head": lambda b, h, q, k: (b * 30 + h * 10 <= k) & (k <= q),
    "and": and_masks(causal, lambda b, h, q, k: q - k < 50),
    "or": or_masks(documents, lambda b, h, q, k: k < 10),
    "neighbourhood": neighbourhood,
    "blocks": lambda b, h, q, k: BLOCKS[q // 16, k // 16],
    "table of pairs": lambda b, h, q, k: PAIRS[q, k],
    "table of distances": lambda b, h, q, k: DISTANCES[q - k + 149],
    "negative index": lambda b, h, q, k: DISTANCES[q - k],
    "sine": lambda b, h, q, k: torch.sin(q * k) > 0,
    "floats": lambda b, h, q, k: q * 0.5 > k,
    "number": lambda b, h, q, k: q < 70.5,
    "captured floating number": lambda b, h, q, k: q < HALF,
    "computed table": lambda b, h, q, k: (IDS * 2 + OFFSET)[q] > k // 16,
    "as booleans": lambda b, h, q, k: (q // 40).bool() & (k - q).to(torch.bool),
    "quotient": lambda b, h, q, k: q / 4 > k,
    "truncated": lambda b, h, q, k: torch.div(q - k, 16, rounding_mode="trunc") == 1,
    "shift": lambda b, h, q, k: (q >> 4) == (k >> 4),
    "in place": in_place,
    "in place of a view": in_place_of_view,
    "in place of a view of what is filled": in_place_of_filled,
    "arithmetic of bools": of_bool_arithmetic,
    "where": lambda b, h, q, k: torch.where(q < 64, k, q + 40) > 60,
    "logical": lambda b, h, q, k: torch.logical_and(q, torch.logical_not(k < 32)),
    "column of a table": lambda b, h, q, k: (k < 20) | PAIRS[q, 3],
    "number made inside": lambda b, h, q, k: q + torch.tensor(5) >= k,
    "captured number": lambda b, h, q, k: q + OFFSET >= k,
    "distance times alpha": lambda b, h, q, k: torch.sub(q, k, alpha=2) > 0,
    "overflow": lambda b, h, q, k: (q << 32) * ((k - 75) << 32) * q > 0,
    "overflow of int32": lambda b, h, q, k: (q + 2**31 - 50).int() > 0,
    "all": lambda b, h, q, k: q.new_ones((), dtype=torch.bool),
    "none": lambda b, h, q, k: q < 0,
}


def assert_same(mask_mod, *sizes, BLOCK_SIZE):
    found = qkv.block_mask(mask_mod, *sizes, BLOCK_SIZE=BLOCK_SIZE)
    true = create_block_mask(mask_mod, *sizes, device="cpu", BLOCK_SIZE=BLOCK_SIZE)
    for name in LISTS:
        a, b = getattr(found, name), getattr(true, name)
        assert a.dtype == b.dtype and torch.equal(a, b), (name, a, b)
    assert (found.seq_lengths, found.BLOCK_SIZE) == (true.seq_lengths, true.BLOCK_SIZE)
    assert found.mask_mod is mask_mod


@pytest.mark.parametrize("size", [16, (16, 32), (7, 25), 128, 200], ids=str)
@pytest.mark.parametrize("name", MASKS)
def test_lists_are_those_of_torch(name, size):
    assert_same(MASKS[name], B, H, L, S, BLOCK_SIZE=size)


def test_without_batch_and_heads():
    assert_same(documents, None, None, 128, 128, BLOCK_SIZE=(32, 64))


def test_sizes_of_numpy():
    found = qkv.block_mask(causal, *map(np.int64, (1, 2, 100, 90)), BLOCK_SIZE=np.int64(16))
    assert found.kv_indices.equal(qkv.block_mask(causal, 1, 2, 100, 90, BLOCK_SIZE=16).kv_indices)
    assert isinstance(found.seq_lengths[0], int) and isinstance(found.BLOCK_SIZE[0], int)


NUMBERS = st.integers(-40, 40)
LEAVES = st.sampled_from(["q", "k", "b", "h", "IDS[q]", "PER_ITEM[b, k]", "BLOCKS[h, k // 16]"])


def grown(inner):
    pairs = st.tuples(inner, inner)
    return (
        st.tuples(pairs, st.sampled_from("+ - * == != < <= > >=".split())).map(
            lambda x: f"({x[0][0]} * 1 {x[1]} {x[0][1]} * 1)"
        )
        | st.tuples(inner, st.sampled_from(["//", "%"]), st.integers(1, 40)).map(
            lambda x: f"(({x[0]}) * 1 {x[1]} {x[2]})"
        )
        | st.tuples(inner, NUMBERS).map(lambda x: f"(({x[0]}) + ({x[1]}))")
        | st.tuples(pairs, st.sampled_from("& | ^".split())).map(
            lambda x: f"(({x[0][0]} > 3) {x[1]} ({x[0][1]} < 30))"
        )
        | st.tuples(pairs, st.sampled_from(["minimum", "maximum"])).map(
            lambda x: f"torch.{x[1]}({x[0][0]} * 1, {x[0][1]} * 1)"
        )
        | st.tuples(pairs, inner).map(
            lambda x: f"torch.where({x[1]} > 20, {x[0][0]} * 1, {x[0][1]} * 1)"
        )
        | inner.map(lambda x: f"({x} * 1).abs()")
        | inner.map(lambda x: f"(-({x} * 1)).clamp(-30, 60)")
    )


@given(
    st.recursive(LEAVES, grown, max_leaves=8),
    st.sampled_from(["> 5", "== 3", "!= 0", "<= 40"]),
    st.integers(1, 70),
    st.integers(1, 70),
    st.tuples(st.integers(1, 40), st.integers(1, 40)),
)
def test_of_any_expression(expression, end, length, keys, size):
    mask_mod = eval(f"lambda b, h, q, k: ({expression}) * 1 {end}", globals())
    assert_same(mask_mod, 2, 3, length, keys, BLOCK_SIZE=size)


@pytest.mark.parametrize("name", ["documents", "neighbourhood", "prefix", "quotient"])
def test_attention_takes_it(name):
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(B, H, n, 16, generator=generator) for n in (L, S, S))
    found = qkv.attention(
        query, key, value, spans=qkv.block_mask(MASKS[name], B, H, L, S, BLOCK_SIZE=32)
    )
    index = torch.meshgrid(*map(torch.arange, (B, H, L, S)), indexing="ij")
    true = qkv.attention(query, key, value, attn_mask=MASKS[name](*index))
    torch.testing.assert_close(found, true)


DOCUMENTS = torch.arange(LONG) // 512
FEW = {  # with the blocks that have to be evaluated, of 128 x 128
    "causal": (causal, 128),
    "documents": (lambda b, h, q, k: (DOCUMENTS[q] == DOCUMENTS[k]) & (q >= k), 128),
    "window": (lambda b, h, q, k: (q - k).abs() <= 256, 126 + 126),
    "chunks": (lambda b, h, q, k: q // 1024 == k // 1024, 0),
    "distances": (lambda b, h, q, k: DOCUMENTS[(q - k).abs()] < 1, 124 * 2),
}


@pytest.mark.parametrize("name", FEW)
def test_evaluates_few_blocks(name, monkeypatch):
    function, blocks = FEW[name]
    pairs = 0
    vmap = torch.vmap

    def counting(inner, in_dims):
        function = vmap(inner, in_dims)

        def outer(b, h, q, k):
            nonlocal pairs
            pairs += q.numel() * k.size(1)
            return function(b, h, q, k)

        return outer if in_dims == (0, 0, 0, 0) else function

    monkeypatch.setattr(torch, "vmap", counting)
    qkv.block_mask(function, 1, 1, LONG, LONG)
    assert pairs == blocks * 128**2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"B": 0}, "block_mask: B is 0"),
        ({"H": -1}, "block_mask: H is -1"),
        ({"Q_LEN": 0}, "block_mask: Q_LEN is 0"),
        ({"KV_LEN": 2.0}, "block_mask: KV_LEN is 2.0"),
        ({"BLOCK_SIZE": (16, 0)}, "block_mask: BLOCK_SIZE is 0"),
        ({"BLOCK_SIZE": 16.0}, "block_mask: BLOCK_SIZE is 16.0, but a number from 1 is expected"),
        ({"BLOCK_SIZE": (16,)}, r"block_mask: BLOCK_SIZE is \(16,\)"),
        ({"device": "meta"}, "block_mask: device is meta"),
        ({"mask_mod": None}, "block_mask: mask_mod is None"),
        ({"mask_mod": lambda b, h, q, k: q + k}, "block_mask: mask_mod gives torch.int64"),
    ],
)
def test_errors_name_the_argument(change, message):
    arguments = {"mask_mod": causal, "B": 1, "H": 1, "Q_LEN": 8, "KV_LEN": 8}
    with pytest.raises(ValueError, match=message):
        qkv.block_mask(**(arguments | change))


def test_a_branch_on_a_position_fails_as_it_does_in_torch():
    def branching(b, h, q, k):
        return q >= k if q > 3 else k < 2

    with pytest.raises(RuntimeError, match="data-dependent"):
        create_block_mask(branching, 1, 1, 8, 8, device="cpu")
    with pytest.raises(RuntimeError, match="data-dependent"):
        qkv.block_mask(branching, 1, 1, 8, 8)
