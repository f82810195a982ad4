"""Jagged nested tensors through qkv.attention: item by item what dense tensors give."""

import warnings

import pytest
import torch
from common import attend
from torch.nested import nested_tensor, nested_tensor_from_jagged
from torch.nn.functional import scaled_dot_product_attention

import qkv

pytestmark = [
    pytest.mark.usefixtures("isa"),
    pytest.mark.filterwarnings("ignore:.*nested tensors.*"),
]
LENGTHS = [5, 1, 40, 17]


def jagged(lengths, H=2, D=8, dtype=torch.float64):
    """A jagged tensor [B, H, j, D], and the leaf behind it, [B, j, H, D]."""
    leaf = nested_tensor(
        [torch.randn(n, H, D, dtype=dtype) for n in lengths],
        layout=torch.jagged,
        requires_grad=True,
    )
    return leaf.transpose(1, 2), leaf


def three(q_lengths, k_lengths=None, Hkv=2, Dv=8, **options):
    """[query, key, value] and their leaves. key and value share their offsets."""
    query, query_leaf = jagged(q_lengths, **options)
    key, key_leaf = jagged(q_lengths if k_lengths is None else k_lengths, H=Hkv, **options)
    if k_lengths is None:  # query has the same offsets
        values = torch.randn(sum(q_lengths), Hkv, 8, dtype=query.dtype, requires_grad=True)
        key_leaf = values
        key = nested_tensor_from_jagged(values, query.offsets()).transpose(1, 2)
    value_leaf = torch.randn(key.values().size(1), Hkv, Dv, dtype=query.dtype, requires_grad=True)
    value = nested_tensor_from_jagged(value_leaf, key.offsets()).transpose(1, 2)
    return [query, key, value], [query_leaf, key_leaf, value_leaf]


def compare(inputs, leaves, **options):
    """Compares output, lse, and the gradients of the leaves, item by item, with dense tensors."""
    output, lse = qkv.attention(*inputs, **options, return_lse=True)
    assert output.shape[:3] == inputs[0].shape[:3] and output.size(3) == inputs[2].size(3)
    assert lse.shape == inputs[0].shape[:3]
    per_item = [
        {n: x[i] if torch.is_tensor(x) and x.dim() == 2 else x for n, x in options.items()}
        for i in range(inputs[0].size(0))
    ]
    items = zip(*(x.unbind() for x in inputs), per_item, strict=True)
    truths = [attend(*parts, **own) for *parts, own in items]
    ours = list(zip(output.unbind(), lse.unbind(), strict=True))
    for found, truth in zip(ours, truths, strict=True):
        torch.testing.assert_close(found, truth, rtol=1e-11, atol=1e-11)
    seeds = [[torch.randn_like(x) for x in pair] for pair in truths]

    def grads(results):
        pairs = zip(results, seeds, strict=True)
        loss = sum((x * g).sum() for r, s in pairs for x, g in zip(r, s, strict=True))
        found = torch.autograd.grad(loss, leaves)
        return [x.values() if x.is_nested else x for x in found]

    torch.testing.assert_close(grads(ours), grads(truths), rtol=1e-10, atol=1e-10)


class TestAgainstDense:
    def test_self_attention(self):
        compare(*three(LENGTHS))
        compare(*three(LENGTHS), is_causal=True, scale=0.3)

    def test_cross_attention(self):
        compare(*three(LENGTHS, [7, 30, 2, 17]))
        compare(*three(LENGTHS, [7, 30, 2, 17], Dv=3), is_causal=True, window_size=(9, 9))

    def test_grouped_heads(self):
        query, query_leaf = jagged(LENGTHS, H=6)
        (_, key, value), (_, *leaves) = three(LENGTHS, LENGTHS, Hkv=2)
        compare([query, key, value], [query_leaf, *leaves], enable_gqa=True)

    @pytest.mark.parametrize("lead", [(), (4,)])
    def test_options(self, lead):
        slopes, sinks = (f(*lead, 2, dtype=torch.float64) for f in (torch.rand, torch.randn))
        inputs, leaves = three(LENGTHS, [7, 30, 2, 17])
        options = {"alibi_slopes": slopes.requires_grad_(), "sinks": sinks.requires_grad_()}
        compare(inputs, [*leaves, slopes, sinks], **options, softcap=2.0, window_size=(5, 3))

    def test_empty_items(self):
        inputs, leaves = three([5, 0, 3], [4, 6, 0])
        compare(inputs, leaves)

    def test_one_tensor_for_all(self):
        x, leaf = jagged(LENGTHS)
        compare([x, x, x], [leaf], is_causal=True)

    def test_heads_first_in_memory(self):
        """A nested tensor made of [H, T, D] values, without a transpose."""
        leaf = torch.randn(2, 63, 8, dtype=torch.float64, requires_grad=True)
        x = nested_tensor_from_jagged(leaf, torch.tensor([0, 5, 6, 46, 63]), jagged_dim=2)
        compare([x, x, x], [leaf])

    def test_as_torch(self):
        inputs, _ = three(LENGTHS, dtype=torch.float32)
        ours, theirs = (f(*inputs) for f in (qkv.attention, scaled_dot_product_attention))
        assert ours.shape == theirs.shape
        torch.testing.assert_close(ours.values(), theirs.values(), rtol=1e-5, atol=1e-6)


def with_holes(starts, lengths, batch=3, room=9, H=2, D=8):
    """[B, H, j, D] by torch.nested.narrow of a dense [B, room, H, D], which is the leaf."""
    leaf = torch.randn(batch, room, H, D, dtype=torch.float64, requires_grad=True)
    x = torch.nested.narrow(
        leaf, 1, torch.tensor(starts), torch.tensor(lengths), layout=torch.jagged
    )
    assert x.lengths() is not None
    return x.transpose(1, 2), leaf


class TestHoles:
    def narrowed(self, x, leaf):
        """A value for `x`: another tensor with its offsets and lengths."""
        values = torch.randn_like(leaf.detach()).requires_grad_()
        value = nested_tensor_from_jagged(values.flatten(0, 1), x.offsets(), x.lengths())
        return value.transpose(1, 2), values

    @pytest.mark.parametrize("options", [
        {}, {"is_causal": True}, {"window_size": (3, 1)}, {"window_size": (2, 0), "softcap": 2.0},
        {"alibi_slopes": torch.rand(3, 2).double(), "sinks": torch.randn(3, 2).double()},
        {"alibi_slopes": torch.rand(2).double(), "sinks": torch.randn(2).double()},
    ])  # fmt: skip
    def test_everywhere(self, options):
        query, query_leaf = with_holes([1, 0, 2], [2, 6, 3])
        key, key_leaf = with_holes([0, 3, 1], [7, 6, 3])
        value, value_leaf = self.narrowed(key, key_leaf)
        compare([query, key, value], [query_leaf, key_leaf, value_leaf], **options)

    def test_a_bias_of_the_longest_item(self):
        """It needs no rows for the room between the items."""
        query, _ = with_holes([1, 0, 2], [2, 4, 3])
        output = qkv.attention(query, query, query, bias=torch.zeros(2, 4, 4))
        expected = qkv.attention(query, query, query)
        for found, item in zip(output.unbind(), expected.unbind(), strict=True):
            assert torch.equal(found, item)

    def test_in_the_keys_alone(self):
        query, query_leaf = jagged([3, 8, 1])
        key, key_leaf = with_holes([0, 3, 1], [7, 6, 3])
        value, value_leaf = self.narrowed(key, key_leaf)
        compare([query, key, value], [query_leaf, key_leaf, value_leaf], window_size=(3, 1))

    def test_in_the_queries_alone(self):
        query, query_leaf = with_holes([1, 0, 2], [2, 6, 3])
        inputs, leaves = three([1, 1, 1], [7, 0, 12])
        compare([query, *inputs[1:]], [query_leaf, *leaves[1:]], window_size=(3, 1))

    def test_junk_in_the_holes(self):
        query, query_leaf = with_holes([1, 0, 2], [2, 6, 3])
        with torch.no_grad():
            for b, (start, n) in enumerate([(1, 2), (0, 6), (2, 3)]):
                query_leaf[b, :start], query_leaf[b, start + n :] = float("nan"), float("nan")
        output = qkv.attention(query, query, query)
        for item in output.unbind():
            assert item.isfinite().all()
        (g,) = torch.autograd.grad(sum(x.sum() for x in output.unbind()), query_leaf)
        assert g.isfinite().all()


class TestResult:
    def test_is_laid_out_like_query(self):
        """The output is laid out like query, so that it goes on through a model: x +
        attention(...), transposed back."""
        leaf = nested_tensor([torch.randn(n, 16) for n in LENGTHS], layout=torch.jagged)
        query = leaf.unflatten(-1, (2, 8)).transpose(1, 2)
        output = qkv.attention(query, query, query)
        assert output.is_nested and output.layout == torch.jagged
        merged = output.transpose(1, 2).flatten(2)
        assert merged.shape == leaf.shape and (leaf + merged).shape == leaf.shape
        assert merged.values().is_contiguous()
        assert merged.values().data_ptr() == output.values().data_ptr()

    def test_dropout(self):
        inputs, leaves = three([20, 20, 20])
        dense = [torch.stack(x.unbind()) for x in inputs]
        torch.manual_seed(1)
        output = qkv.attention(*inputs, dropout_p=0.4)
        torch.manual_seed(1)
        expected = qkv.attention(*dense, dropout_p=0.4)
        torch.testing.assert_close(torch.stack(output.unbind()), expected)

    @pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
    def test_compile(self):
        torch.compiler.reset()
        x, leaf = jagged(LENGTHS)

        def f(x):
            return (qkv.attention(x, x, x, is_causal=True) * 2).values()

        compiled = torch.compile(f, backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(compiled(x), f(x))
        expected, found = (torch.autograd.grad(g(x).sum(), leaf)[0] for g in (f, compiled))
        torch.testing.assert_close(found.values(), expected.values())
        x, _ = jagged([3, 50, 2, 9, 1])  # other lengths, and another number of them
        torch.testing.assert_close(compiled(x), f(x))


def strided(lengths):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated
        return nested_tensor([torch.zeros(2, n, 8) for n in lengths], layout=torch.strided)


def zeros(lengths, H=2, D=8):
    values = torch.zeros(sum(lengths), H, D)
    offsets = torch.tensor([0, *torch.tensor(lengths).cumsum(0)])
    return nested_tensor_from_jagged(values, offsets).transpose(1, 2)


X = zeros([5, 2])
HOLES = nested_tensor_from_jagged(
    torch.zeros(7, 2, 8), torch.tensor([0, 5, 7]), torch.tensor([3, 1])
).transpose(1, 2)


@pytest.mark.parametrize("change, message", [
    ({"query": strided([5, 2])}, "query is a nested tensor with the layout torch.strided.*jagged"),
    ({"value": strided([5, 2])}, "value is a nested tensor with the layout torch.strided"),
    ({"query": torch.zeros(2, 2, 5, 8)}, r"query is dense, \[2, 2, 5, 8\]"),
    ({"key": torch.zeros(2, 2, 5, 8)}, "key is dense"),
    ({"value": X.transpose(1, 2)}, "value is a jagged tensor of 4 dimensions, ragged in 1"),
    ({"query": X.transpose(1, 2).flatten(2)}, "query is a jagged tensor of 3 dimensions"),
    ({"attn_mask": torch.zeros(5, 5)}, "attn_mask is given, but None is expected"),
    ({"attn_mask": X}, "attn_mask is given, but None is expected"),
    ({"query": zeros([5, 2, 1])}, "3, 2 and 2 items"),
    ({"value": zeros([4, 3])}, r"value's items lie elsewhere than key's.*\[0, 5, 7\].*\[0, 4, 7\]"),
    ({"key": zeros([5, 2], H=3)}, "heads"),
    ({"key": zeros([5, 2], D=7)}, "key has the shape"),
    ({"sinks": torch.zeros(3)}, "sinks"),
    ({"query": HOLES, "sinks": torch.zeros(3, 2)}, r"sinks is \[3, 2\], but 1 or 2 items"),
    ({"dropout_p": 2.0}, "dropout_p is 2"),
])  # fmt: skip
def test_bad_call(change, message):
    arguments = {"query": X, "key": X, "value": X, **change}
    with pytest.raises((RuntimeError, ValueError), match=f"attention: .*{message}"):
        qkv.attention(**arguments)


def test_equal_offsets_are_as_good_as_the_same():
    key, value = zeros([5, 2]), zeros([5, 2])
    assert qkv.attention(X, key, value).shape == X.shape


def test_the_same_lengths_are_not_the_same_items():
    lengths, values = torch.tensor([3, 2]), torch.randn(10, 2, 8)
    starts = [torch.tensor(x) for x in ([0, 5, 10], [2, 7, 10])]
    key, value = (nested_tensor_from_jagged(values, x, lengths).transpose(1, 2) for x in starts)
    assert key.shape == value.shape
    with pytest.raises(RuntimeError, match=r"value's items lie elsewhere.*\[2, 7, 10\]"):
        qkv.attention(key, key, value)
