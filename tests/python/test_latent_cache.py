"""qkv.latent_attention_with_kvcache: rows are appended in place, then attended to by either way as
the keys and values that they stand for would be."""

import pytest
import torch
import torch._dynamo.testing
from common import COMPILERS, INF, assert_example_runs, compute_type, dtypes_of
from latent import DV, C, H, N, R, heads_of
from test_latent import TIMES, both_ways
from torch.utils.flop_counter import FlopCounterMode

import qkv
from qkv import testing
from qkv.testing._items import quantize

B, ROOM, SIZE = 3, 12, 4  # batch items, rows for each of them, rows of a block
LENGTHS = [3, 0, 7]


def make(L=2, new=2, kind="rows", scale=None, dtype=torch.float64):
    """A call. kind: "rows", "chosen", "padded" or "paged". scale: of an int8 cache, None, "one" or
    "rows". What nobody may read is NaN, and a block that nobody may look up has no number."""
    call = {
        "query_nope": torch.randn(B, H, L, N), "query_rope": torch.randn(B, H, L, R),
        "cache": torch.randn(B, 1, ROOM, C + R),
        "key_weight": torch.randn(H, N, C) / C**0.5, "value_weight": torch.randn(H, DV, C) / C**0.5,
        "latents": torch.randn(B, 1, new or 0, C), "rope_keys": torch.randn(B, 1, new or 0, R),
    }  # fmt: skip
    call = {n: x.to(dtype) for n, x in call.items()}
    if new is None:
        call |= {"latents": None, "rope_keys": None}
    call["cache_seqlens"] = torch.tensor(LENGTHS, dtype=torch.int32)
    beyond = torch.arange(ROOM) >= call["cache_seqlens"][:, None] + (new or 0)
    call["cache"][beyond.unsqueeze(1)] = torch.nan
    if kind == "chosen":
        spare = torch.full((2, 1, ROOM, C + R), torch.nan, dtype=dtype)
        call["cache"] = torch.cat([spare, call["cache"]])
        call["cache_batch_idx"] = torch.tensor([4, 2, 3])
    if kind == "padded":
        call["cache_leftpad"] = torch.tensor([2, 0, 5], dtype=torch.int32)
    if kind == "paged":
        order = torch.randperm(B * ROOM // SIZE)
        call["cache"] = call["cache"].view(-1, 1, SIZE, C + R)[order.argsort()]
        call["block_table"] = order.view(B, -1).int()
        needed = -(-(call["cache_seqlens"] + (new or 0)) // SIZE)
        call["block_table"][torch.arange(ROOM // SIZE) >= needed[:, None]] = 10**6
        call["block_table"][0, -1] = -7
    if scale == "one":
        call["cache_scale"] = torch.tensor([0.02])
        call["cache"] = quantize(call["cache"], call["cache_scale"])[0]
    if scale == "rows":
        call["cache"], call["cache_scale"] = quantize(call["cache"])
    return call


def places(call, b):
    """The rows of batch item b, as indices of the cache's first and third dimensions."""
    at = torch.arange(ROOM)
    if (table := call.get("block_table")) is not None:
        needed = int(call["cache_seqlens"][b]) + appended(call)
        return table[b].long()[at[:needed] // SIZE], at[:needed] % SIZE
    index = call.get("cache_batch_idx")
    return torch.full_like(at, b if index is None else int(index[b])), at


def appended(call):
    return 0 if call["latents"] is None else call["latents"].size(2)


def written(call):
    """The cache and its scales as the call has to leave them."""
    cache, scale = call["cache"].clone(), call.get("cache_scale")
    scale = None if scale is None else scale.clone()
    if call["latents"] is None:
        return cache, scale
    new = call["latents"]
    if call["rope_keys"] is not None:
        new = torch.cat([new, call["rope_keys"]], -1)
    for b in range(B):
        rows, at = (x[LENGTHS[b] : LENGTHS[b] + new.size(2)] for x in places(call, b))
        numbers = new[b, 0]
        if scale is not None:
            numbers, own = quantize(numbers, scale if scale.dim() == 1 else None)
            if scale.dim() > 1:
                scale[rows, 0, at] = own
        cache[rows, 0, at] = numbers
    return cache, scale


def attend_to_heads(call, dtype, made_in, **options):
    """(output, lse) of attention to caches of keys and values that are made in a dtype."""
    cache, scale = written(call)
    if scale is not None:
        cache = cache.double() * (scale.unsqueeze(-1) if scale.dim() > 1 else scale)
    weights = (call[n].to(made_in) for n in ("key_weight", "value_weight"))
    keys, values = heads_of(*cache.to(made_in).split([C, R], -1), *weights)
    given = {n: call[n] for n in ("cache_batch_idx", "cache_leftpad") if n in call}
    if "block_table" in call:
        given["block_table"] = call["block_table"].clamp(0, len(cache) - 1)
    query = torch.cat([call["query_nope"], call["query_rope"]], -1).to(made_in)
    lengths = call["cache_seqlens"] + appended(call)
    return testing.attention_with_kvcache(
        query, keys, values, **given, cache_seqlens=lengths, dtype=dtype, **options
    )[:2]


def compare(call, absorb=None, **options):
    """Holds what is returned and what is left in memory."""
    dtype = call["query_nope"].dtype
    expected = attend_to_heads(call, torch.float64, torch.float64, **options)
    theirs = attend_to_heads(call, compute_type(dtype), dtype, **options)
    memory = [n for n in ("cache", "cache_scale") if n in call]
    after = dict(zip(memory, written(call), strict=False))
    output, lse = qkv.latent_attention_with_kvcache(
        **call, **options, absorb=absorb, return_softmax_lse=True
    )
    assert (output.dtype, lse.dtype) == (dtype, compute_type(dtype))
    testing.assert_close(output, expected[0], theirs[0].to(dtype), times=TIMES)
    testing.assert_close(lse, expected[1], theirs[1], times=TIMES)
    for name in memory:
        assert torch.equal(call[name].nan_to_num(99), after[name].nan_to_num(99)), name
    return output


every_kind = pytest.mark.parametrize("kind", ["rows", "chosen", "padded", "paged"])
OPTIONS = {
    "nothing": dict,
    "causal": lambda: {"causal": True},
    "window": lambda: {"window_size": (4, 1)},
    "no window": lambda: {"window_size": (-1, -1)},
    "softcap": lambda: {"softcap": 1.5},
    "scale": lambda: {"softmax_scale": -0.6},
    "slopes": lambda: {"alibi_slopes": torch.rand(B, H)},
    "bias": lambda: {"bias": torch.randn(B, H, 1, ROOM)},
    "spans": lambda: {"spans": torch.tensor([0, 2, 3, 8], dtype=torch.int32).expand(B, H, 2, 4)},
    "sinks": lambda: {"sinks": torch.randn(H)},
    "all": lambda: {
        "causal": True, "window_size": (6, 0), "softcap": 2.0, "softmax_scale": 0.4,
        "alibi_slopes": torch.rand(H), "bias": torch.randn(H, 2, ROOM), "sinks": torch.randn(B, H),
        "spans": torch.tensor([0, 2, 3, 8], dtype=torch.int32).expand(B, 1, 2, 4),
    },
}  # fmt: skip


class TestAgainstHeads:
    @both_ways
    @every_kind
    @pytest.mark.parametrize("scale", [None, "one", "rows"])
    @dtypes_of("f32", "bf16", "f16")
    def test_caches(self, dtype, scale, kind, absorb):
        compare(make(kind=kind, scale=scale, dtype=dtype), absorb)

    @both_ways
    @every_kind
    @pytest.mark.parametrize("L, new", [(1, 1), (1, None), (4, 2), (2, 4), (0, 3), (3, 0)])
    def test_sizes(self, L, new, kind, absorb):
        call = make(L, new, kind)
        compare(call | {"cache_seqlens": call["cache_seqlens"].long()}, absorb, causal=True)

    @both_ways
    @every_kind
    @pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
    def test_options(self, options, kind, absorb):
        call = make(kind=kind)
        compare(call, absorb, **options())
        compare(call, absorb, **options())  # what was appended is overwritten

    def test_rows_that_are_appended_whole(self):
        call = make()
        rows = torch.cat([call["latents"], call["rope_keys"]], -1)
        compare(call | {"latents": rows, "rope_keys": None}, causal=True)

    def test_the_whole_cache(self):
        call = make(new=None) | {"cache": torch.randn(B, 1, ROOM, C + R, dtype=torch.float64)}
        del call["cache_seqlens"]
        expected = qkv.latent_attention_with_kvcache(**call, cache_seqlens=ROOM)
        for way in (True, False):
            found = qkv.latent_attention_with_kvcache(**call, absorb=way)
            testing.assert_close(found, expected)

    @both_ways
    def test_a_row_without_keys(self, absorb):
        call = make(new=None)
        output, lse = qkv.latent_attention_with_kvcache(
            **call, absorb=absorb, return_softmax_lse=True
        )
        assert (output[1] == 0).all() and (lse[1] == -INF).all() and lse[0].isfinite().all()

    def test_strides(self):
        """Of a cache that lies between other numbers, which nobody touches."""
        for kind in ("rows", "paged"):
            call = make(kind=kind)
            wide = torch.full((*call["cache"].shape[:3], C + R + 3), 5.0, dtype=torch.float64)
            wide[..., 2 : 2 + C + R] = call["cache"]
            compare(call | {"cache": wide[..., 2 : 2 + C + R]}, causal=True)
            assert (wide[..., :2] == 5).all() and (wide[..., 2 + C + R :] == 5).all()

    @both_ways
    def test_score_mod(self, absorb):
        """The last query has the number of the last key."""
        call, twin = (make() | {"cache": torch.zeros(B, 1, ROOM, C + R).double()} for _ in range(2))
        twin |= {n: call[n] for n in call if n != "cache"}
        found = qkv.latent_attention_with_kvcache(
            **call, score_mod=lambda s, b, h, q, k: s - 0.3 * (q - k).abs(), absorb=absorb
        )
        slopes = torch.full((H,), 0.3, dtype=torch.float64)
        expected = qkv.latent_attention_with_kvcache(**twin, alibi_slopes=slopes, absorb=absorb)
        testing.assert_close(found, expected)

    @both_ways
    @dtypes_of("f64", "bf16")
    def test_prompt_and_steps_are_latent_attention(self, dtype, absorb):
        """Causal attention, whole: a prompt first, then a token at a time."""
        prompt, total = 9, 20
        query = [torch.randn(2, H, total, n).to(dtype) for n in (N, R)]
        latents, rope_keys = (torch.randn(2, 1, total, n).to(dtype) for n in (C, R))
        weights = [x.to(dtype) / C**0.5 for x in (torch.randn(H, N, C), torch.randn(H, DV, C))]
        cache = torch.zeros(2, 1, total, C + R, dtype=dtype)
        found = []
        for begin, end in [(0, prompt), *((n, n + 1) for n in range(prompt, total))]:
            at = lambda x: x[:, :, begin:end]  # noqa: B023, E731
            found.append(qkv.latent_attention_with_kvcache(
                *map(at, query), cache, *weights, at(latents), at(rope_keys),
                cache_seqlens=begin, causal=True, absorb=absorb,
            ))  # fmt: skip
        assert torch.equal(cache, torch.cat([latents, rope_keys], -1))
        expected = qkv.latent_attention(*query, latents, rope_keys, *weights, is_causal=True)
        bound = 1e-12 if dtype == torch.float64 else 3e-2
        torch.testing.assert_close(torch.cat(found, 2), expected, rtol=0, atol=bound)

    def test_example(self):
        assert_example_runs(qkv.latent_attention_with_kvcache)


def products(call, absorb):
    call = call | {n: call[n].clone() for n in ("cache",)}
    with FlopCounterMode(display=False) as mode:
        qkv.latent_attention_with_kvcache(**call, absorb=absorb)
    return mode.get_total_flops()


def test_which_way():
    """A step absorbs, a prompt is expanded; what counts is what the cache has, not its room."""
    step, prompt = make(1, 1), make(10, 10) | {"cache_seqlens": 0}
    for call in (step, prompt):
        ways = [products(call, x) for x in (True, False)]
        assert products(call, None) == ways[call is prompt]
        assert ways[0] != ways[1]


@both_ways
def test_a_table_of_a_pool_without_blocks(absorb):
    """No row has a key, so no block is looked up, whatever the table says."""
    call = make(new=None, kind="paged") | {"cache_seqlens": 0}
    output, lse = qkv.latent_attention_with_kvcache(
        **call | {"cache": call["cache"][:0]}, absorb=absorb, return_softmax_lse=True
    )
    assert (output == 0).all()
    assert (lse == -INF).all()


@pytest.mark.usefixtures("nothing_compiled")
class TestCompile:
    @pytest.mark.one_in(2)
    @pytest.mark.parametrize("backend", COMPILERS)
    @pytest.mark.parametrize("kind", ["rows", "paged"])
    @both_ways
    def test_decoding(self, backend, kind, absorb):
        """One graph serves all lengths; the cache changes inside and outside of it."""

        def step(call, n):
            call = call | {"query_nope": call["query_nope"].sin(), "latents": call["latents"] * 2}
            output = qkv.latent_attention_with_kvcache(
                **call, cache_seqlens=n, causal=True, absorb=absorb
            )
            return output.cos(), call["cache"].nan_to_num().sum()

        counter = torch._dynamo.testing.CompileCounterWithBackend(backend)
        compiled = torch.compile(step, backend=counter, fullgraph=True, dynamic=True)
        whole = make(1, 1, kind)
        del whole["cache_seqlens"]
        whole |= {"cache": whole["cache"].nan_to_num()}
        if kind == "paged":
            whole["block_table"] = torch.arange(9).view(3, 3)
        twin, graphs = whole | {"cache": whole["cache"].clone()}, set()
        for n in ([3, 0, 7], [4, 1, 8], [5, 2, 9]):
            lengths = torch.tensor(n)
            testing.assert_close(compiled(whole, lengths), step(twin, lengths))
            assert torch.equal(whole["cache"], twin["cache"])
            graphs.add(counter.frame_count)
        assert len(graphs) == 1  # none after the first call

    @both_ways
    def test_meta(self, absorb):
        call = {n: x.to("meta") for n, x in make(dtype=torch.bfloat16).items()}
        output, lse = qkv.latent_attention_with_kvcache(
            **call, absorb=absorb, return_softmax_lse=True
        )
        assert (output.shape, output.dtype) == ((B, H, 2, DV), torch.bfloat16)
        assert (lse.shape, lse.dtype) == ((B, H, 2), torch.float32)


@both_ways
def test_vmap(absorb):
    """Every sample has a cache of its own, which is written to."""
    calls = [make(), make()]
    names = ("query_nope", "query_rope", "cache", "latents", "rope_keys")
    samples = {n: torch.stack([x[n].nan_to_num() for x in calls]) for n in names}
    shared = {n: calls[0][n] for n in ("key_weight", "value_weight", "cache_seqlens")}
    f = lambda x: qkv.latent_attention_with_kvcache(**x, **shared, absorb=absorb)  # noqa: E731
    alone = [{n: x[i].clone() for n, x in samples.items()} for i in range(2)]
    testing.assert_close(torch.vmap(f)(samples), torch.stack([f(x) for x in alone]))
    assert torch.equal(samples["cache"], torch.stack([x["cache"] for x in alone]))


@both_ways
def test_autocast(absorb):
    """Casts all but the cache."""
    call = make(dtype=torch.float32)
    cast = {n: x.bfloat16() if x.is_floating_point() else x for n, x in call.items()}
    call["cache"] = cast["cache"].clone()
    expected = qkv.latent_attention_with_kvcache(**cast, absorb=absorb)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = qkv.latent_attention_with_kvcache(**call, absorb=absorb)
        assert torch.equal(found, expected)
        call["cache"] = call["cache"].float()
        with pytest.raises(RuntimeError, match="cache is float32, but query_nope is bfloat16"):
            qkv.latent_attention_with_kvcache(**call)
    assert torch.equal(call["cache"].bfloat16().nan_to_num(9), cast["cache"].nan_to_num(9))


class TestErrors:
    """Nothing has been written when the error comes."""

    @both_ways
    @pytest.mark.parametrize("change, message", [
        ({"latents": None}, "rope_keys is given, but latents is None; expected both or neither"),
        ({"rope_keys": None}, r"latents has .*C \+ R\] = \[3, 1, 2, 12\]"),
        ({"latents": torch.zeros(3, 1, 2, 7)}, r"latents has .*\[3, 1, 2, 8\]"),
        ({"latents": torch.zeros(3, 2, 2, 8)}, r"latents has .*\[3, 1, 2, 8\]"),
        ({"latents": torch.zeros(2, 1, 2, 8)}, r"latents has .*\[3, 1, 2, 8\]"),
        ({"latents": torch.zeros(3, 1, 2, 8).double()}, "latents is float64, but query_nope"),
        ({"rope_keys": torch.zeros(3, 1, 1, 4)}, r"rope_keys has .*\[3, 1, 2, 4\]"),
        ({"cache": torch.zeros(3, 1, 12, 11)}, r"cache has .*C \+ R\] = \[3, 1, 12, 12\]"),
        ({"cache": torch.zeros(3, 2, 12, 12)}, r"cache has .*C \+ R\] = \[3, 1, 12, 12\]"),
        ({"cache": torch.zeros(3, 12, 12)}, "cache has the shape.*4 dimensions"),
        ({"cache": torch.zeros(2, 1, 12, 12)}, "cache has 2 rows and query_nope 3"),
        ({"cache": torch.zeros(3, 1, 12, 12).half()}, "cache is float16, but query_nope"),
        ({"cache": torch.zeros(3, 1, 12, 12).to("meta")}, "cache is on meta"),
        ({"query_nope": torch.zeros(3, 5, 6)}, "query_nope has the shape.*4 dimensions"),
        ({"query_rope": torch.zeros(3, 3, 1, 4)}, r"query_rope has .*\[3, 3, 2, 4\]"),
        ({"key_weight": torch.zeros(2, 6, 8)}, r"key_weight has .*\[3, 6, 8\]"),
        ({"value_weight": torch.zeros(3, 7, 9)}, r"value_weight has .*\[3, 7, 8\]"),
        ({"cache_seqlens": None}, "latents is given, but cache_seqlens is None"),
        ({"cache_seqlens": 11}, r"cache_seqlens\[0\] is 11.*room for 12"),
        ({"cache_seqlens": torch.tensor([0, -1, 0])}, r"cache_seqlens\[1\] is -1"),
        ({"cache_seqlens": torch.ones(3)}, "cache_seqlens is float32"),
        ({"cache_batch_idx": torch.tensor([0, 1, 3])}, r"cache_batch_idx\[2\] is 3"),
        ({"cache_leftpad": torch.tensor([0, 1, 0])}, r"cache_leftpad\[1\] is 1"),
        ({"cache_scale": torch.ones(1)}, "cache_scale is given, but cache is float32"),
        ({"softcap": -1.0}, "softcap is -1"),
        ({"sinks": torch.zeros(2)}, "sinks has the shape"),
        ({"bias": torch.zeros(2, 8)}, r"bias has the shape \[2, 8\].*2 queries and 9 keys"),
        ({"spans": torch.tensor([[5, 2]]).int()}, "the span 0 from 5 to 2"),
    ])  # fmt: skip
    def test_bad_call(self, change, message, absorb):
        call = make(dtype=torch.float32) | change
        before = call["cache"].clone()
        with pytest.raises((RuntimeError, ValueError), match=message):
            qkv.latent_attention_with_kvcache(**call, absorb=absorb)
        if not before.is_meta:
            assert torch.equal(call["cache"].nan_to_num(9), before.nan_to_num(9))

    @both_ways
    def test_blocks_and_scales(self, absorb):
        f = qkv.latent_attention_with_kvcache
        paged, int8 = make(kind="paged"), make(scale="rows", dtype=torch.float32)
        paged["block_table"][2, 1] = 9
        with pytest.raises(RuntimeError, match=r"block_table\[2, 1\] is 9.*9 blocks"):
            f(**paged, absorb=absorb)
        with pytest.raises(RuntimeError, match="cache_scale has the shape"):
            f(**int8 | {"cache_scale": torch.ones(2)}, absorb=absorb)
        with pytest.raises(RuntimeError, match="cache is int8, but cache_scale is None"):
            f(**int8 | {"cache_scale": None}, absorb=absorb)

    @both_ways
    def test_memory_that_overlaps(self, absorb):
        call = make(1, 1)
        sliding = torch.zeros(400).double().as_strided((B, 1, ROOM, C + R), (100, 100, 8, 1))
        with pytest.raises(RuntimeError, match="cache, with the strides.*clone"):
            qkv.latent_attention_with_kvcache(**call | {"cache": sliding}, absorb=absorb)
        inside = call["cache"][:, :, :1]
        with pytest.raises(RuntimeError, match="key shares memory with k_cache"):
            qkv.latent_attention_with_kvcache(
                **call | {"latents": inside, "rope_keys": None}, absorb=absorb
            )
        # What is copied before rows are written may lie where they go to.
        query = call["cache"][:, :, 3:4, :R]
        compare(call | {"query_rope": query.expand(-1, H, -1, -1)}, absorb)

    @both_ways
    @pytest.mark.parametrize("name", [
        "query_nope", "query_rope", "cache", "key_weight", "value_weight", "latents", "rope_keys",
    ])  # fmt: skip
    def test_gradients_are_refused(self, name, absorb):
        call = make()
        before = call["cache"].nan_to_num(9)
        call[name] = call[name].clone().requires_grad_()
        with pytest.raises(RuntimeError, match=f"{name} requires grad.*no_grad"):
            qkv.latent_attention_with_kvcache(**call, absorb=absorb)
        assert torch.equal(call["cache"].detach().nan_to_num(9), before)
        with torch.no_grad():
            compare(call, absorb)


class TestValuesThatBeginKeys:
    """attention_with_kvcache itself, whose values may be the first numbers of the keys: then keys
    alone are written. Any other overlap is refused."""

    def call(self, **change):
        torch.manual_seed(2)
        cache, new = torch.randn(2, 1, 6, 8), torch.randn(2, 1, 1, 8)
        call = {
            "query": torch.randn(2, 3, 1, 8), "k_cache": cache, "v_cache": cache[..., :5],
            "key": new, "value": new[..., :5], "cache_seqlens": torch.tensor([2, 4]),
        }  # fmt: skip
        return call | {n: f(cache, new) for n, f in change.items()}

    def test_written_once(self):
        call, twin = self.call(), self.call(v_cache=lambda c, n: c[..., :5].clone())
        found, expected = (qkv.attention_with_kvcache(**x) for x in (call, twin))
        assert torch.equal(found, expected)
        assert torch.equal(call["k_cache"], twin["k_cache"])
        assert torch.equal(call["k_cache"][0, 0, 2], call["key"][0, 0, 0])

    def test_as_wide_as_keys(self):
        call = self.call(v_cache=lambda c, n: c, value=lambda c, n: n)
        twin = self.call(v_cache=lambda c, n: c.clone(), value=lambda c, n: n)
        assert torch.equal(*(qkv.attention_with_kvcache(**x) for x in (call, twin)))

    def test_int8_has_one_scale(self):
        call = self.call(k_cache=lambda c, n: (9 * c).to(torch.int8))
        call |= {"v_cache": call["k_cache"][..., :5], "k_scale": torch.ones(2, 1, 6)}
        before = call["k_cache"].clone()
        with pytest.raises(RuntimeError, match="share memory"):
            qkv.attention_with_kvcache(**call, v_scale=torch.ones(2, 1, 6))
        assert torch.equal(call["k_cache"], before)
        qkv.attention_with_kvcache(**call, v_scale=call["k_scale"])
        numbers, scale = quantize(call["key"])
        assert torch.equal(call["k_cache"][0, :, 2], numbers[0, :, 0])
        assert torch.equal(call["k_scale"][0, :, 2], scale[0, :, 0])

    @pytest.mark.parametrize("change", [
        {"v_cache": lambda c, n: c[..., 1:6]},
        {"v_cache": lambda c, n: c[:, :, :, ::2], "value": lambda c, n: n[..., ::2]},
        {"value": lambda c, n: n[..., :5].clone()},
        {"value": lambda c, n: n[..., 1:6]},
    ])  # fmt: skip
    def test_other_overlaps_are_refused(self, change):
        call = self.call(**change)
        before = call["k_cache"].clone()
        with pytest.raises(RuntimeError, match="share memory"):
            qkv.attention_with_kvcache(**call)
        assert torch.equal(call["k_cache"], before)
