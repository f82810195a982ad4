"""python -m benchmarks --suite decode."""

import json

import pytest
import torch
from bench_runs import PNG, markdown_rows, run_program, tables_of

import qkv
from benchmarks import case, ours, packing, truth
from benchmarks.case import Case, copies
from benchmarks.check import WrongAnswer, check
from benchmarks.options import parse
from benchmarks.suites import SUITES
from benchmarks.tables import markdown
from qkv.bench.measure import quartiles

SHAPES = "cache:2x4/2x1x40x8,paged:2x4/2x3x40x8"


def test_decoding_is_the_promised_one():
    assert [f"{entry.name} {entry}" for entry in SUITES["decode"].entries] == [
        "decode cache:8x32/8x1x4096x128",
        "decode-4 cache:8x32/8x4x4096x128",
        "decode-16 cache:8x32/8x16x4096x128",
        "decode1 cache:1x32/8x1x4096x128",
        "one-head cache:1x8/1x1x65536x128",
        "ungrouped cache:4x8x1x4096x128",
        "paged paged:8x32/8x1x4096x128",
        "int8 int8:8x32/8x1x4096x128",
        "int8-ungrouped int8:4x8x1x4096x128",
    ]


def test_caches_are_too_many_for_a_cache(monkeypatch):
    inputs = {"query": torch.randn(3), "key": torch.randn(2, 5), "value": torch.randn(2, 5)}
    assert copies(inputs, is_cold=False) == [inputs]
    monkeypatch.setattr(case, "uncached_bytes", lambda: 200)  # a copy has 80
    found = copies(inputs, is_cold=True)
    assert len(found) == 3
    for name, is_shared in (("query", True), ("key", False), ("value", False)):
        assert all(x[name].equal(inputs[name]) for x in found)
        assert len({x[name].data_ptr() for x in found}) == (1 if is_shared else 3)
    monkeypatch.setattr(case, "uncached_bytes", lambda: 1 << 40)
    assert len(copies(inputs, is_cold=True)) == case.MOST_COPIES


def test_calls_take_the_copies_in_turn(monkeypatch):
    monkeypatch.setattr(case, "uncached_bytes", lambda: 1 << 40)
    seen = []

    def cache(query, k_cache, v_cache, **options):
        seen.append((k_cache.data_ptr(), v_cache.data_ptr()))
        return torch.zeros_like(query)

    monkeypatch.setattr(qkv, "attention_with_kvcache", cache, raising=False)
    call = Case(parse("cache:1x2x1x4x8"), torch.float32, False).calls["qkv"].timed("forward")
    for _ in range(2 * case.MOST_COPIES):
        call()
    assert len(set(seen)) == case.MOST_COPIES and seen[: case.MOST_COPIES] * 2 == seen


@pytest.mark.parametrize("seqlen_k", [1, 16, 40])
def test_pages_hold_the_cache(seqlen_k):
    key, value = torch.randn(3, 2, seqlen_k, 8), torch.randn(3, 2, seqlen_k, 5)
    found = ours.pages({"key": key, "value": value})
    number = -(-seqlen_k // ours.PAGE)
    table = found["block_table"]
    assert sorted(table.flatten().tolist()) == list(range(3 * number))
    for x, pages in ((key, found["key"]), (value, found["value"])):
        assert pages.shape == (3 * number, 2, ours.PAGE, x.size(-1)) and pages.is_contiguous()
        for b, j in ((0, 0), (2, seqlen_k - 1)):
            page = pages[table[b, j // ours.PAGE]]
            assert page[:, j % ours.PAGE].equal(x[b, :, j])


def test_torch_gathers_the_pages():
    """torch's attention is given keys and values as they were before they went into pages."""
    found = Case(parse("paged:3x4/2x2x40x8"), torch.float64, with_gradients=False)
    output = packing.gathered(found.turns[0], found.grad_output).output()
    torch.testing.assert_close(output, truth.answers(found)["output"])


def test_int8_holds_the_cache():
    """Every dtype has its numbers, and torch's attention is given them."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        found = Case(parse("int8:3x4/2x2x40x8"), dtype, with_gradients=False)
        int8 = found.turns[0]
        for name, scale in (("key", "k_scale"), ("value", "v_scale")):
            assert int8[name].dtype == torch.int8 and int8[name].abs().amax() > 64
            wide = int8[name].double() * int8[scale].double().unsqueeze(-1)
            assert torch.equal(wide, found.inputs[name].double())
        output = packing.widened(int8, found.grad_output).output()
        torch.testing.assert_close(
            output.double(), truth.answers(found)["output"], atol=2e-2, rtol=2e-2
        )
        assert found.base.entry.option == "cache"


@pytest.mark.parametrize("name", ["cache", "paged", "int8"])
def test_a_wrong_cache_is_not_timed(monkeypatch, name):
    attention = qkv.attention_with_kvcache

    def too_short(*args, cache_seqlens, **options):
        return attention(*args, cache_seqlens=cache_seqlens - 1, **options)

    entry = parse(f"{name}:2x4/2x1x40x8")
    assert list(check(Case(entry, torch.bfloat16, with_gradients=False))) == ["output"]
    monkeypatch.setattr(qkv, "attention_with_kvcache", too_short)
    with pytest.raises(WrongAnswer, match=": output is off by "):
        check(Case(entry, torch.bfloat16, with_gradients=False))


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """(stdout, run, bytes of the plot) of a short run of the decode suite."""
    folder = tmp_path_factory.mktemp("bench")
    done = run_program(
        "benchmarks", "--suite", "decode", "--shapes", SHAPES, "--seconds", 0.01, "--threads", 2,
        "--json", folder / "run.json", "--plot", folder / "run.png",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    run = json.loads((folder / "run.json").read_text())
    return done.stdout, run, (folder / "run.png").read_bytes()


@pytest.mark.long
def test_every_shape_in_every_dtype(finished):
    _, run, _ = finished
    assert run["suite"] == "decode" and run["directions"] == ["forward"]
    assert run["machine"]["dtype"] == "float32, bfloat16, float16"
    assert set(run["peak"]) == {"read_gbs", "read_gbs_before", "read_gbs_after"}
    assert [(r["name"], r["dtype"]) for r in run["results"]] == [
        (name, dtype) for name in SHAPES.split(",") for dtype in ("float32", "bfloat16", "float16")
    ]
    for result in run["results"]:
        assert set(result["check"]) == {"output"}
        assert result["read_gbs"] > 0
        size = 2 * 2 * 40 * 16 * (4 if result["dtype"] == "float32" else 2)
        forward = result["forward"]
        for name in ("qkv", "torch"):
            found = forward[name]
            assert found["gbs"] == size / found["seconds"]["median"] / 1e9
        pairs = zip(forward["torch"]["samples_s"], forward["qkv"]["samples_s"], strict=True)
        assert forward["ratio"] == quartiles([t / q for t, q in pairs])
    assert run["geometric_mean"] == {"forward": None}


@pytest.mark.long
def test_table_of_decoding(finished):
    stdout, run, _ = finished
    [(titles, rows)] = tables_of(stdout)
    for row, result in zip(rows, run["results"], strict=True):
        cells, forward = dict(zip(titles, row, strict=True)), result["forward"]
        assert cells["dtype"] == result["dtype"]
        assert cells["K and V read, GB/s"] == f"{forward['qkv']['gbs']:.1f}"
        assert cells["of memory's"] == f"{forward['qkv']['gbs'] / result['read_gbs']:.0%}"
        assert cells["memory, GB/s"] == f"{result['read_gbs']:.1f}"
    lines = markdown_rows(markdown(run, SUITES["decode"].tables(run)))
    assert len(lines) == 2 + 6 and {line.count("|") for line in lines} == {13}


@pytest.mark.long
def test_plot_of_decoding_is_a_picture(finished):
    assert finished[2].startswith(PNG) and len(finished[2]) > 10_000
