"""attention_jvp: what torch.func.jvp of the reference gives, and of attention to the bit."""

import warnings

import pytest
import torch
from common import HALVES, NO_OPTIONS
from directions import grouped, jvp
from test_forward_mode import DV, OPTIONS, SIZES, B, D, H, L, S, draw, reference
from test_forward_mode import attend as attention
from test_jagged import jagged, with_holes
from torch.library import opcheck
from torch.nested import nested_tensor_from_jagged

import qkv


def named(tangents):
    return {f"{name}_tangent": x for name, x in tangents.items()}


def attention_jvp(inputs, tangents, **options):
    """((output, lse), their tangents), as torch.func.jvp returns them."""
    torch.manual_seed(1)
    output, lse, *moved = qkv.attention_jvp(**inputs, **options, **named(tangents))
    return (output, lse), tuple(moved)


def assert_equal(found, expected):
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("case", OPTIONS)
class TestOptions:
    def test_against_the_reference(self, case):
        names, options = OPTIONS[case]
        inputs, tangents = draw(names), draw(names)
        found = attention_jvp(inputs, tangents, **options)
        torch.testing.assert_close(found, jvp(reference, inputs, tangents, **options))

    def test_each_tangent_alone(self, case):
        names, options = OPTIONS[case]
        inputs, tangents = draw(names), draw(names)
        for name in inputs:
            alone = {name: tangents[name]}
            found = attention_jvp(inputs, alone, **options)
            torch.testing.assert_close(found, jvp(reference, inputs, alone, **options))

    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32, *HALVES])
    def test_as_forward_mode(self, case, dtype):
        names, options = OPTIONS[case]
        inputs, tangents = draw(names, dtype), draw(names, dtype)
        found = attention_jvp(inputs, tangents, **options)
        assert_equal(found, jvp(attention, inputs, tangents, **options))

    def test_backward(self, case):
        """With respect to inputs and tangents."""
        names, options = OPTIONS[case]
        inputs, tangents = draw(names), draw(names)
        leaves = [x.requires_grad_() for x in (*inputs.values(), *tangents.values())]
        seeds = [torch.randn(B, H, L, DV).double(), torch.randn(B, H, L).double()]

        def gradients(results):
            return torch.autograd.grad(results, leaves, (*seeds, *seeds), allow_unused=True)

        (output, lse), moved = attention_jvp(inputs, tangents, **options)
        truths, moved_truths = jvp(reference, inputs, tangents, **options)
        found, expected = gradients((output, lse, *moved)), gradients((*truths, *moved_truths))
        torch.testing.assert_close(found, expected)

    def test_vmap(self, case):
        names, options = OPTIONS[case]
        samples = [(draw(names), draw(names)) for _ in range(3)]
        stacked = [{n: torch.stack([x[i][n] for x in samples]) for n in samples[0][0]}
                   for i in range(2)]  # fmt: skip
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=".*performance drop")  # torch's loop
            found = torch.vmap(lambda *x: attention_jvp(*x, **options), randomness="same")(*stacked)
        each = [attention_jvp(*x, **options) for x in samples]
        for i in range(len(samples)):
            own = tuple(tuple(x[i] for x in pair) for pair in found)
            torch.testing.assert_close(own, each[i])

    def test_opcheck(self, case):
        names, options = OPTIONS[case]
        inputs, tangents = draw(names, torch.float32), draw(names, torch.float32)
        options = {**options, "dropout_p": 0.0}  # which draws another seed each time
        opcheck(
            torch.ops.qkv.attention_jvp.default,
            tuple(inputs.pop(name) for name in ("query", "key", "value")),
            inputs | named(tangents) | options,
        )


def test_without_tangents():
    """Nothing changes, and the results are attention's."""
    inputs = draw(("sinks",))
    results, moved = attention_jvp(inputs, {})
    torch.testing.assert_close(results, attention(inputs))
    assert all((x == 0).all() for x in moved)


def test_shapes_dtypes_and_strides():
    inputs, tangents = (
        {name: x.transpose(1, 2).contiguous().transpose(1, 2) for name, x in draw((), dt).items()}
        for dt in (torch.bfloat16, torch.bfloat16)
    )
    (output, lse), (output_tangent, lse_tangent) = attention_jvp(inputs, tangents)
    assert output.stride() == attention(inputs)[0].stride() == output_tangent.stride()
    assert output_tangent.shape == (B, H, L, DV) and output_tangent.dtype == torch.bfloat16
    assert lse.shape == lse_tangent.shape == (B, H, L)
    assert lse.dtype == lse_tangent.dtype == torch.float32


def test_dropout_draws_a_seed():
    inputs, tangents = draw(()), draw(())
    torch.manual_seed(1)
    results = [qkv.attention_jvp(**inputs, **named(tangents), dropout_p=0.5) for _ in range(2)]
    assert not torch.equal(results[0][2], results[1][2])
    assert_equal(results[0][2], attention_jvp(inputs, tangents, dropout_p=0.5)[1][0])


def test_grouped_heads_and_broadcasting():
    inputs, tangents = grouped(L, S, D, DV)
    found = attention_jvp(inputs, tangents, enable_gqa=True)
    torch.testing.assert_close(found, jvp(reference, inputs, tangents, enable_gqa=True))


@pytest.mark.parametrize("dtype", HALVES)
def test_autocast(dtype):
    """query, key, value, attn_mask and their tangents are cast, and nothing else is."""
    names = ("attn_mask", "bias", "sinks")
    inputs, tangents = draw(names, torch.float32), draw(names, torch.float32)
    with torch.autocast("cpu", dtype=dtype):
        found = attention_jvp(inputs, tangents)
        torch.manual_seed(1)
        assert_equal(found, jvp(attention, inputs, tangents))
    cast = ("query", "key", "value", "attn_mask")
    by_hand = [{n: x.to(dtype) if n in cast else x for n, x in given.items()}
               for given in (inputs, tangents)]  # fmt: skip
    assert_equal(found, attention_jvp(*by_hand))


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled(dynamic):
    inputs, tangents = draw(("bias",)), draw(("bias",))
    f = lambda x, t: qkv.attention_jvp(**x, **named(t), softcap=1.5)  # noqa: E731
    found = torch.compile(f, fullgraph=True, dynamic=dynamic, backend="aot_eager")(inputs, tangents)
    torch.testing.assert_close(found, f(inputs, tangents))


def test_a_tangent_of_a_tangent():
    """Forward mode through it is another derivative, and no silent zero."""
    inputs, tangents = draw(()), draw(())

    def twice(f):
        moved = lambda x: torch.func.jvp(f, (x,), (tangents["query"],))[1]  # noqa: E731
        return torch.func.jvp(moved, (inputs["query"],), (tangents["query"],))[1]

    expected = twice(lambda q: reference(inputs | {"query": q})[0])
    moved = lambda q: attention_jvp(  # noqa: E731
        inputs | {"query": q}, {"query": tangents["query"]}
    )[1][0]
    found = torch.func.jvp(moved, (inputs["query"],), (tangents["query"],))[1]
    torch.testing.assert_close(found, expected)


def low_level(inputs, tangents, **options):
    """A call of the operator that computes it."""
    none = dict.fromkeys(f"{name}_tangent" for name in (*SIZES, "score_tables"))
    return torch.ops.qkv.attention_forward_jvp(
        **NO_OPTIONS | inputs | none | named(tangents) | options
    )


def test_opcheck_of_packed_documents():
    x, t = torch.randn(2, 9, 3, 4)
    ends = torch.tensor([0, 2, 9], dtype=torch.int32)
    bias = torch.randn(3, 7, 7)
    inputs = {"query": x, "key": x, "value": x, "bias": bias}
    call = NO_OPTIONS | inputs | {"cu_seq_q": ends, "seqused_k": torch.tensor([2, 5])}
    call |= dict.fromkeys(f"{name}_tangent" for name in (*SIZES, "score_tables"))
    call |= {"query_tangent": t, "value_tangent": t, "bias_tangent": bias, "softcap": 2.0}
    opcheck(torch.ops.qkv.attention_forward_jvp.default, (), call)


TENSORS = {name: torch.zeros(size) for name, size in SIZES.items()}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"key_tangent": torch.zeros(B, H, S, D + 1)},
         r"key_tangent has the shape \[2, 4, 9, 9\], but \[2, 4, 9, 8\] is expected"),
        ({"query_tangent": torch.zeros(L, D)}, r"query_tangent has the shape \[7, 8\]"),
        ({"value_tangent": TENSORS["value"].double()},
         "value_tangent is float64, but float32 is expected"),
        ({"sinks_tangent": torch.zeros(1)}, "sinks_tangent is given, but sinks is None"),
        ({"alibi_slopes": TENSORS["alibi_slopes"], "alibi_slopes_tangent": torch.zeros(1)},
         r"alibi_slopes_tangent has the shape \[1\], but \[4\] is expected"),
        ({"attn_mask": torch.ones(L, S) > 0, "attn_mask_tangent": torch.zeros(L, S)},
         "attn_mask_tangent is given, but attn_mask is bool"),
        ({"bias": TENSORS["bias"], "bias_tangent": torch.zeros(1, H, 1, S).to_sparse()},
         "bias_tangent has the layout Sparse"),
        ({"key": torch.zeros(B, 3, S, D)}, "key has 3 heads and query 4"),
        ({"dropout_p": 2.0}, "dropout_p is 2"),
    ],
)  # fmt: skip
def test_bad_calls(change, message):
    call = {name: TENSORS[name] for name in ("query", "key", "value")} | change
    for device in ("cpu", "meta"):
        own = {n: x.to(device) if torch.is_tensor(x) else x for n, x in call.items()}
        with pytest.raises((RuntimeError, ValueError), match=f"attention_jvp: {message}"):
            qkv.attention_jvp(**own)


def test_a_tangent_elsewhere():
    call = {name: TENSORS[name] for name in ("query", "key", "value")}
    with pytest.raises(RuntimeError, match="attention_jvp: key_tangent is on meta"):
        qkv.attention_jvp(**call, key_tangent=TENSORS["key"].to("meta"))


def test_bad_keyword():
    x = torch.zeros(3, 2)
    with pytest.raises(TypeError, match="unexpected keyword argument 'mask_tangent'"):
        qkv.attention_jvp(x, x, x, mask_tangent=x)  # pyright: ignore[reportCallIssue]
    with pytest.raises(RuntimeError, match="query"):
        qkv.attention_jvp(3, x, x)  # pyright: ignore[reportArgumentType]


@pytest.mark.filterwarnings("ignore:.*nested tensors.*")
class TestJagged:
    def compare(self, inputs, tangents, **options):
        """With the results and tangents of each item alone."""
        moved = dict(zip(("query_tangent", "key_tangent", "value_tangent"), tangents, strict=True))
        found = qkv.attention_jvp(*inputs, **moved, **options)
        assert all(x.is_nested and x.shape[:3] == inputs[0].shape[:3] for x in found)
        items = zip(*(x.unbind() for x in found), strict=True)
        parts = [zip(*(x.unbind() for x in given), strict=True) for given in (inputs, tangents)]
        for n, (ours, its, directions) in enumerate(zip(items, *parts, strict=True)):
            own = {name: x[n] if torch.is_tensor(x) and x.dim() == 2 else x
                   for name, x in options.items()}  # fmt: skip
            alone = dict(zip(moved, directions, strict=True))
            torch.testing.assert_close(ours, qkv.attention_jvp(*its, **alone, **own))

    def make(self, lengths, count):
        """Jagged tensors with the same offsets."""
        first, _ = jagged(lengths)
        like = [nested_tensor_from_jagged(torch.randn(sum(lengths), 2, 8).double(), first.offsets())
                for _ in range(count - 1)]  # fmt: skip
        return [first.detach(), *(x.transpose(1, 2) for x in like)]

    def test_items(self):
        query, query_tangent = self.make([5, 1, 40, 0], 2)
        key, value, key_tangent, value_tangent = self.make([7, 30, 2, 17], 4)
        options = {"softcap": 2.0, "is_causal": True}
        for shape in ((2,), (4, 2)):
            options |= {name: torch.rand(shape).double() for name in (
                "alibi_slopes", "sinks", "alibi_slopes_tangent", "sinks_tangent")}  # fmt: skip
            self.compare(
                (query, key, value), (query_tangent, key_tangent, value_tangent), **options
            )

    def test_holes(self):
        (query, _), (tangent, _) = (with_holes([1, 0, 2], [2, 6, 3]) for _ in range(2))
        query, tangent = query.detach(), tangent.detach()
        sinks, sinks_tangent = torch.rand(2, 3, 2).double()
        self.compare(
            [query] * 3, [tangent] * 3, window_size=(2, 0), sinks=sinks, sinks_tangent=sinks_tangent
        )

    def test_autocast(self):
        x, t = (y.float() for y in self.make([3, 2], 2))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found = qkv.attention_jvp(x, x, x, query_tangent=t)
        expected = qkv.attention_jvp(*[x.bfloat16()] * 3, query_tangent=t.bfloat16())
        assert_equal([y.values() for y in found], [y.values() for y in expected])

    @pytest.mark.parametrize(
        ("tangent", "message"),
        [
            (torch.zeros(2, 2, 3, 8).double(), r"query_tangent is dense, \[2, 2, 3, 8\]"),
            ([2, 3], "query_tangent's items lie elsewhere than query's"),
            ([5], "query_tangent's items lie elsewhere than query's"),
        ],
    )
    def test_tangents_that_do_not_fit(self, tangent, message):
        x, *_ = self.make([3, 2], 1)
        if isinstance(tangent, list):
            (tangent,) = self.make(tangent, 1)
        with pytest.raises(RuntimeError, match=f"attention_jvp: {message}"):
            qkv.attention_jvp(x, x, x, query_tangent=tangent)
