"""Spans: what their builders show, and that functions which take them do as with the mask that
they stand for. What they compute in every combination is drawn by test_attention_*.py and
tests/truth."""

import itertools

import numpy as np
import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import gradcheck, gradgradcheck
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention.flex_attention import create_block_mask, create_mask
from torch.testing import assert_close

import qkv
from qkv import Spans, testing

L = 70
QUERIES, KEYS = torch.arange(L)[:, None], torch.arange(L)
IDS = torch.tensor([0] * 20 + [1] * 30 + [2] * 20)
IMAGES = torch.tensor([-1] * 10 + [1] * 5 + [-1] * 20 + [2] * 35)
BAND = (KEYS - QUERIES >= -3) & (KEYS - QUERIES <= 4)
SIZES = torch.tensor([5, 30])
GROUPS = (IMAGES[:, None] == IMAGES) & (IMAGES >= 0)
# name: spans, and the mask that they stand for by its definition.
BUILT = {
    "documents": (Spans.documents(IDS), IDS[:, None] == IDS),
    "documents of a batch": (
        Spans.documents(torch.stack([IDS, IDS * 0])),
        torch.stack([IDS[:, None] == IDS, torch.ones(L, L, dtype=torch.bool)])[:, None],
    ),
    "groups": (Spans.groups(IMAGES), GROUPS),
    "groups or causal": (
        Spans.groups(IMAGES) | Spans.window(L, right=0), GROUPS | (KEYS <= QUERIES)
    ),
    "prefix": (Spans.prefix(12, L), (KEYS < 12) | (KEYS <= QUERIES)),
    "prefix of a batch": (
        Spans.prefix(SIZES, L), ((SIZES[:, None] > KEYS)[:, None] | (KEYS <= QUERIES))[:, None]
    ),
    "chunks": (Spans.chunks(16, L), QUERIES // 16 == KEYS // 16),
    "window": (Spans.window(L, 3, 4), BAND),
    "window of fewer queries": (
        Spans.window(40, 3, 0, seqlen_k=L), ((KEYS - QUERIES >= -3) & (KEYS <= QUERIES))[L - 40 :]
    ),
    "window and global": (
        Spans.window(L, 3, 4, first=2), BAND | (KEYS < 2) | (QUERIES < 2)
    ),
    "window and global of numpy's numbers": (
        Spans.window(np.int64(L), 3, 4, first=np.int64(2)), BAND | (KEYS < 2) | (QUERIES < 2)
    ),
    "chunks and window": (
        Spans.chunks(16, L) & Spans.window(L, 5, 1),
        (QUERIES // 16 == KEYS // 16) & (KEYS - QUERIES >= -5) & (KEYS - QUERIES <= 1),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BUILT)
def test_builders(name):
    spans, mask = BUILT[name]
    assert spans.to_mask(L).equal(mask)
    assert spans.tensor.dtype == torch.int32
    assert Spans.from_mask(mask).to_mask(L).equal(mask)
    queries = mask.size(-2)
    query, key, value = torch.randn(2, 3, queries, 8), *torch.randn(2, 2, 3, L, 8)
    assert_close(
        qkv.attention(query, key, value, spans=spans), qkv.attention(query, key, value, mask)
    )


def neighbours(size, kernel, dilation, is_causal):
    """bool [size, size], as NATTEN's documentation says it: of the points that lie a multiple of
    the dilation away, the `kernel` nearest ones around, moved inside at the edges."""
    seen = torch.zeros(size, size, dtype=torch.bool)
    for i in range(size):
        row = list(range(i % dilation, size, dilation))
        own = row.index(i)
        first = own - kernel + 1 if is_causal else own - kernel // 2
        if not is_causal:
            first = min(max(first, 0), len(row) - kernel)
        for n in range(max(first, 0), first + kernel):
            seen[i, row[n]] = True
    return seen


@pytest.mark.parametrize(
    "sizes, kernel, dilation, is_causal",
    [
        ((9,), 4, 1, False), ((9,), 3, 2, True), ((6, 8), 3, 1, False), ((6, 8), (6, 8), 1, False),
        ((7, 9), (3, 2), (2, 3), (False, True)), ((4, 5, 6), (2, 3, 3), (2, 1, 1), (True, 0, 0)),
    ],
)  # fmt: skip
def test_neighborhood(sizes, kernel, dilation, is_causal):
    spans = Spans.neighborhood(sizes, kernel, dilation, is_causal)
    rank = len(sizes)
    of_each = [x if isinstance(x, tuple) else (x,) * rank for x in (kernel, dilation, is_causal)]
    expected = torch.ones(1, 1, dtype=torch.bool)
    for along in zip(sizes, *of_each, strict=True):
        seen = neighbours(*along)
        expected = torch.kron(expected.int(), seen.int()).bool()
    assert spans.to_mask(expected.size(1)).equal(expected)
    if dilation == 1:  # a span for each row of the window
        assert spans.count <= torch.tensor(of_each[0])[:-1].prod()


def test_tree():
    parents = [-1, 0, 0, 1, 1, 2]
    seen = Spans.tree(parents, first=3).to_mask(9)
    for i, j in itertools.product(range(6), range(6)):
        above, node = set(), i
        while node >= 0:
            above.add(node)
            node = parents[node]
        assert seen[i, 3 + j] == (j in above)
    assert seen[:, :3].all()


def documents_of(b, h, q, k):
    return (q // 300 == k // 300) & (q >= k)


@pytest.mark.parametrize("sizes", [(1000, 1000), (300, 700), (1, 5)], ids=str)
@pytest.mark.parametrize(
    "function",
    [
        documents_of, lambda b, h, q, k: (q - k).abs() <= 37, lambda b, h, q, k: q + 10 * h >= k,
        lambda b, h, q, k: q < 0,
    ],
    ids=["documents", "window", "heads", "nothing"],
)  # fmt: skip
def test_block_mask(function, sizes):
    for heads in (None, 2):
        block_mask = create_block_mask(function, None, heads, *sizes, device="cpu")
        spans = Spans.from_block_mask(block_mask)
        expected = create_mask(function, None, heads, *sizes, device="cpu")
        assert spans.to_mask(sizes[1]).equal(expected[0] if heads else expected[0, 0])


def test_block_mask_is_taken_as_it_is():
    calls = []

    def function(b, h, q, k):
        calls.append(q)
        return documents_of(b, h, q, k)

    block_mask = create_block_mask(function, None, None, 700, 700, device="cpu", BLOCK_SIZE=64)
    query, key, value = torch.randn(3, 1, 2, 700, 16)
    output = qkv.attention(query, key, value, spans=block_mask)
    mask = create_mask(documents_of, None, None, 700, 700, device="cpu")
    assert_close(output, qkv.attention(query, key, value, mask))
    evaluated = len(calls)
    assert qkv.attention(query, key, value, spans=block_mask).equal(output)
    assert len(calls) == evaluated


def new_block_mask(width=3):
    def band(b, h, q, k):
        return (q - k).abs() <= width

    return create_block_mask(band, None, None, 30, 30, device="cpu", BLOCK_SIZE=16)


@pytest.mark.parametrize("lead", [(), (2,), (1, 2)], ids=str)
def test_block_mask_of_queries_without_batch_and_heads(lead):
    query, key, value = torch.randn(3, *lead, 30, 8)
    output = qkv.attention(query, key, value, spans=new_block_mask())
    assert output.equal(qkv.attention(query, key, value, spans=Spans.window(30, 3, 3)))


def in_grad(query, block_mask):
    return torch.func.grad(lambda x: qkv.attention(x, x, x, spans=block_mask).sum())(query)


def in_jvp(query, block_mask):
    return torch.func.jvp(lambda x: qkv.attention(x, x, x, spans=block_mask), (query,), (query,))


def in_vmap(query, block_mask):
    return torch.func.vmap(lambda x: qkv.attention(x, x, x, spans=block_mask))(query)


@torch.inference_mode()
def in_inference(query, block_mask):
    return qkv.attention(query, query, query, spans=block_mask)


def in_make_fx(query, block_mask):
    make_fx(lambda x: qkv.attention(x, x, x, spans=block_mask))(query)


def in_trace(query, block_mask):
    torch.jit.trace(lambda x: qkv.attention(x, x, x, spans=block_mask), (query,))


def under_fake_tensors(query, block_mask):
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        assert mode.is_our_fake(in_inference(query, block_mask))


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
@pytest.mark.parametrize("first", [
    in_grad, in_jvp, in_vmap, in_inference, in_make_fx, in_trace, under_fake_tensors,
])  # fmt: skip
def test_a_block_mask_remembers_nothing_of_where_it_was_first_seen(first):
    query, block_mask = torch.randn(1, 2, 30, 8), new_block_mask()
    first(query, block_mask)

    def attend(x):
        return qkv.attention(x, x, x, spans=block_mask)

    expected = qkv.attention(query, query, query, spans=Spans.window(30, 3, 3))
    assert torch.compile(attend, backend="eager", fullgraph=True)(query).equal(expected)
    leaf = query.requires_grad_()
    (grad,) = torch.autograd.grad(attend(leaf).sum(), leaf)
    assert grad.abs().sum() > 0


def test_all_derivatives():
    query, key, value = torch.randn(3, 1, 2, 9, 3, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(9, 9, dtype=torch.float64, requires_grad=True)
    spans = Spans.window(9, 2, 1, first=1)

    def f(query, key, value, bias):
        return qkv.attention(query, key, value, bias=bias, spans=spans, return_lse=True)

    assert gradcheck(f, (query, key, value, bias), check_forward_ad=True, check_batched_grad=True)
    assert gradgradcheck(f, (query, key, value, bias))


@pytest.mark.parametrize("order", [3])
def test_third_derivatives(order):
    """By the composition, which makes a mask of the spans."""
    query, key, value = torch.randn(3, 5, 2, dtype=torch.float64)
    spans = Spans.window(5, 1, 2)

    def derivative(**masks):
        x = query.clone().requires_grad_()
        y = qkv.attention(x, key, value, **masks).pow(2).sum()
        for _ in range(order):
            (y,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return y

    assert_close(derivative(spans=spans), derivative(attn_mask=spans.to_mask(5)))


def with_spans(query, key, value, tensor):
    return qkv.attention(query, key, value, spans=Spans(tensor), is_causal=True)


def test_transforms():
    query, key, value = torch.randn(3, 4, 2, 30, 8)
    spans = Spans.prefix(torch.tensor([3, 9, 20, 30]), 30)
    expected = with_spans(query, key, value, spans.tensor)
    vmapped = torch.func.vmap(with_spans)(query, key, value, spans.tensor)
    assert_close(vmapped, expected)
    of_objects = torch.func.vmap(lambda q, k, v, s: qkv.attention(q, k, v, spans=s, is_causal=True))
    assert_close(of_objects(query, key, value, spans), expected)

    class Model(torch.nn.Module):
        def forward(self, query, key, value, spans):
            return qkv.attention(query, key, value, spans=spans, is_causal=True)

    for given in (spans, spans.tensor):
        exported = torch.export.export(Model(), (query, key, value, given)).module()
        assert exported(query, key, value, given).equal(expected)
        compiled = torch.compile(Model(), backend="aot_eager", fullgraph=True)
        assert compiled(query, key, value, given).equal(expected)


def attend(query, key, value, spans):
    return qkv.attention(query, key, value, spans=spans)


def test_a_compiled_function_takes_new_masks_of_the_same_sizes():
    """Without being compiled anew."""
    query, key, value = torch.randn(3, 1, 2, 30, 8)
    for make in (lambda n: Spans.window(30, n, n), new_block_mask):
        torch.compiler.reset()
        counter = CompileCounterWithBackend("aot_eager")
        compiled = torch.compile(attend, backend=counter, fullgraph=True)
        for width in (3, 4, 7):
            spans = make(width)
            expected = attend(query, key, value, spans)  # a BlockMask remembers its spans
            assert compiled(query, key, value, spans).equal(expected)
        assert counter.frame_count == 1


def test_a_new_block_mask_is_no_part_of_a_graph():
    """How many spans it has depends on its numbers."""
    query, key, value = torch.randn(3, 1, 2, 30, 8)
    expected = attend(query, key, value, Spans.window(30, 3, 3))
    compiled = torch.compile(attend, backend="aot_eager")
    assert compiled(query, key, value, new_block_mask()).equal(expected)
    torch.compiler.reset()
    message = "spans is a BlockMask that no call has had before"
    with pytest.raises(torch._dynamo.exc.Unsupported, match=message):
        torch.compile(attend, backend="aot_eager", fullgraph=True)(
            query, key, value, new_block_mask()
        )
    with pytest.raises(RuntimeError, match=message):
        torch.export.export(Holds(new_block_mask()), (query, key, value), strict=False)


class Holds(torch.nn.Module):
    def __init__(self, spans):
        super().__init__()
        self.spans = spans

    def forward(self, query, key, value):
        return attend(query, key, value, self.spans)


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("make", [lambda: Spans.window(30, 3, 3), new_block_mask])
def test_a_module_that_holds_spans_is_exported(make, strict, tmp_path):
    """They are a constant of the program."""
    query, key, value = torch.randn(3, 1, 2, 30, 8)
    module = Holds(make())
    expected = module(query, key, value)
    exported = torch.export.export(module, (query, key, value), strict=strict)
    torch.export.save(exported, tmp_path / "program.pt2")
    loaded = torch.export.load(tmp_path / "program.pt2").module()
    assert loaded(query, key, value).equal(expected)


def test_packed_documents_and_jagged_tensors():
    """By positions within a document, and cut off at its end."""
    ends = torch.tensor([0, 20, 50, 70])
    query, key, value = torch.randn(3, 70, 2, 8)
    spans = Spans.window(30, 2, 3)
    output = qkv.varlen_attn(query, key, value, ends, ends, 30, 30, spans=spans)
    jagged = [
        torch.nested.nested_tensor_from_jagged(x, ends).transpose(1, 2) for x in (query, key, value)
    ]
    nested = qkv.attention(*jagged, spans=spans).transpose(1, 2).values()
    for begin, end in itertools.pairwise(ends.tolist()):
        of_document = [x[begin:end].transpose(0, 1) for x in (query, key, value)]
        i, j = torch.arange(end - begin)[:, None], torch.arange(end - begin)
        seen = (j >= i - 2) & (j <= i + 3)
        expected = qkv.attention(*of_document, seen).transpose(0, 1)
        assert_close(output[begin:end], expected)
        assert_close(nested[begin:end], expected)


def test_tree_of_drafts_in_a_cache():
    k_cache, v_cache = torch.randn(2, 1, 2, 64, 8)
    query, key, value = torch.randn(3, 1, 2, 4, 8)
    spans = Spans.tree([-1, 0, 0, 2], first=10)
    output = qkv.attention_with_kvcache(
        query, k_cache, v_cache, key, value, cache_seqlens=10, spans=spans
    )
    seen = (k_cache[:, :, :14], v_cache[:, :, :14])
    assert_close(output, qkv.attention(query, *seen, spans.to_mask(14)))


BAD = {
    "spans[0, 2] has the span 1 from 3 to 2, but 0 <= begin <= end <= 8": (
        [0, 8, 3, 2],
        ValueError,
    ),
    "spans[0, 2] has the span 0 from -1 to 2": ([-1, 2, 0, 0], ValueError),
    "spans[0, 2] has the span 0 from 0 to 9": ([0, 9, 0, 0], ValueError),
}


@pytest.mark.parametrize("message", BAD)
def test_numbers_that_do_not_fit(message):
    numbers, error = BAD[message]
    tensor = torch.tensor([0, 8, 0, 0], dtype=torch.int32).repeat(1, 5, 1)
    tensor[0, 2] = torch.tensor(numbers)
    query, key = torch.randn(1, 5, 4), torch.randn(1, 8, 4)
    for function in (qkv.attention, qkv.hard_attention, qkv.attention_with_weights):
        with pytest.raises(error) as caught:
            function(query, key, key, spans=tensor)
        assert message in str(caught.value)


@pytest.mark.parametrize(
    "tensor, message",
    [
        (torch.zeros(5, 3, dtype=torch.int32), "spans has the shape [5, 3], but"),
        (torch.zeros(5, 600, dtype=torch.int32), "the begins and ends of 1 to 256 spans"),
        (torch.zeros((), dtype=torch.int32), "spans has the shape [], but"),
        (torch.zeros(4, 2, dtype=torch.int32), "does not broadcast to [..., H, L, 2 n] = [5, 2]"),
        (torch.zeros(5, 2), "spans is float32, but int32 is expected"),
        (torch.zeros(5, 2, dtype=torch.int64), "spans is int64, but int32 is expected"),
    ],
)
def test_tensors_that_do_not_fit(tensor, message):
    query, key = torch.randn(5, 4), torch.randn(8, 4)
    with pytest.raises(RuntimeError) as caught:
        qkv.attention(query, key, key, spans=tensor)
    assert message in str(caught.value)


ENDS = torch.tensor([0, 3, 8])


def jagged(*shape):
    x = torch.nested.nested_tensor_from_jagged(torch.randn(8, *shape), ENDS)
    return x if len(shape) == 1 else x.transpose(1, 2)


def layer(x, **arguments):
    module = qkv.nn.MultiheadAttention(4, 2, batch_first=True, **arguments)
    return lambda spans: module(x, x, x, spans=spans)


X = torch.randn(1, 2, 5, 4)
TAKE_SPANS = {
    "attention": lambda spans: qkv.attention(X, X, X, spans=spans),
    "jagged": lambda spans: qkv.attention(*[jagged(2, 4)] * 3, spans=spans),
    "attention_jvp": lambda spans: qkv.attention_jvp(X, X, X, spans=spans, query_tangent=X),
    "attention_weights": lambda spans: qkv.attention_weights(X, X, spans=spans),
    "attention_with_weights": lambda spans: qkv.attention_with_weights(X, X, X, spans=spans),
    "hard_attention": lambda spans: qkv.hard_attention(X, X, X, spans=spans),
    "varlen_attn": lambda spans: qkv.varlen_attn(
        *torch.randn(3, 8, 2, 4), ENDS, ENDS, 5, 5, spans=spans
    ),
    "attention_with_kvcache": lambda spans: qkv.attention_with_kvcache(
        torch.randn(1, 2, 1, 4), *torch.randn(2, 1, 2, 8, 4), spans=spans
    ),
    "testing": lambda spans: testing.attention(X, X, X, spans=spans),
    "layer": layer(torch.randn(2, 5, 4)),
    "layer with more keys": layer(torch.randn(2, 5, 4), add_bias_kv=True, add_zero_attn=True),
    "layer, nested": layer(jagged(4)),
}


class BlockMask:
    """Not torch's."""


@pytest.mark.parametrize("name", TAKE_SPANS)
def test_what_is_no_spans(name):
    for spans in ("a", (0, 5), 3, [[0, 5]], BlockMask(), Spans("a"), Spans(None)):
        with pytest.raises(TypeError) as caught:
            TAKE_SPANS[name](spans)
        assert str(caught.value) == (
            f"spans is {spans!r}, but qkv.Spans, FlexAttention's BlockMask or an int32 tensor is "
            "expected"
        )
    if name != "testing":
        with pytest.raises(RuntimeError, match="spans (is|has)"):
            TAKE_SPANS[name](torch.zeros((), dtype=torch.int32))


def test_masks_of_no_span_and_of_samples():
    none = Spans(torch.zeros(3, 0, dtype=torch.int32))
    assert none.to_mask(4).equal(torch.zeros(3, 4, dtype=torch.bool))
    spans = torch.stack([Spans.window(4, n, 0).tensor for n in (1, 2)])
    found = torch.vmap(lambda tensor: Spans(tensor).to_mask(4))(spans)
    assert found.equal(Spans(spans).to_mask(4))


def test_builders_refuse():
    with pytest.raises(ValueError, match="more than one piece"):
        Spans.documents(torch.tensor([0, 1, 0]))
    with pytest.raises(ValueError, match="kernel 3 with dilation 2"):
        Spans.neighborhood((5,), 3, 2)
    with pytest.raises(ValueError, match=r"kernel is \(3,\), but one for all dimensions or 2 are"):
        Spans.neighborhood((5, 5), (3,))
    with pytest.raises(ValueError, match=r"parents is \[1, 2\], but \[L\] is expected"):
        Spans.tree([[-1, 0]])
    with pytest.raises(ValueError, match=r"parents\[1\] is 1"):
        Spans.tree([-1, 1])
    with pytest.raises(ValueError, match="size is 0"):
        Spans.chunks(0, 5)
    with pytest.raises(ValueError, match="left is -2, but -1 or more"):
        Spans.window(8, -2, 0)
    with pytest.raises(ValueError, match="first is -1, but 0 or more"):
        Spans.window(8, 2, 0, first=-1)
    with pytest.raises(ValueError, match="first is -1, but 0 or more"):
        Spans.tree([-1, 0], first=-1)
    with pytest.raises(ValueError, match="65 spans of a query, but at most 64"):
        Spans.from_mask(torch.arange(130)[None] % 2 == 0)
    with pytest.raises(ValueError, match="bool"):
        Spans.from_mask(torch.zeros(3, 3))


@pytest.mark.parametrize("tokens", [0, 1])
def test_empty(tokens):
    assert Spans.documents(torch.zeros(tokens, dtype=torch.int64)).tensor.shape == (tokens, 2)
    query, key = torch.randn(3, 4), torch.randn(tokens, 4)
    spans = torch.zeros(3, 2, dtype=torch.int32)
    output, lse = qkv.attention(query, key, key, spans=spans, return_lse=True)
    assert output.equal(torch.zeros(3, 4)) and (lse == -torch.inf).all()
