"""Packed documents: each is what attention on it alone gives, forward and backward."""

import inspect

import pytest
import torch
from common import INF
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import one_example_in
from torch.nn.attention.varlen import AuxRequest
from torch.nn.attention.varlen import varlen_attn as torch_varlen_attn

import qkv
from qkv import testing

LSE = AuxRequest(lse=True)
NAN = float("nan")
HEADS = ("alibi_slopes", "sinks")


def cumulative(lengths, dtype=torch.int32, start=0):
    return torch.tensor([start, *(start + torch.tensor(lengths).cumsum(0))], dtype=dtype)


def pack(q_lengths, k_lengths=None, H=2, Hkv=None, D=8, Dv=None, dtype=torch.float64):
    """Arguments of varlen_attn: query, key, value, cu_seq_q, cu_seq_k, max_q, max_k."""
    k_lengths = q_lengths if k_lengths is None else k_lengths
    Hkv, Dv = Hkv or H, Dv or D
    shapes = [(sum(q_lengths), H, D), (sum(k_lengths), Hkv, D), (sum(k_lengths), Hkv, Dv)]
    tensors = [torch.randn(s, dtype=dtype).requires_grad_() for s in shapes]
    longest = max(q_lengths, default=0), max(k_lengths, default=0)
    return *tensors, cumulative(q_lengths), cumulative(k_lengths), *longest


def compare(packed, **options):
    """Compares output, lse and every gradient with one_by_one()."""
    leaves = [x for x in (*packed[:3], *(options.get(n) for n in HEADS)) if torch.is_tensor(x)]
    leaves = [x for x in leaves if x.requires_grad]
    ours = qkv.varlen_attn(*packed, return_aux=LSE, **options)
    truths = testing.varlen_attn(*packed, return_aux=LSE, **options)
    seeds = [torch.randn_like(x) for x in ours]
    truths = [x + 0 * leaves[0].sum() for x in truths]  # for calls without a document
    for x, truth in zip(ours, truths, strict=True):
        torch.testing.assert_close(x, truth, rtol=1e-11, atol=1e-11)
    grads = (torch.autograd.grad(x, leaves, seeds, allow_unused=True) for x in (ours, truths))
    for x, truth in zip(*grads, strict=True):
        truth = torch.zeros_like(x) if truth is None else truth
        torch.testing.assert_close(x, truth, rtol=1e-10, atol=1e-10)


def test_signature_is_torchs():
    """varlen_attn has the arguments of torch's, in the same places and with the same defaults, and
    then ours."""
    ours, torchs = (inspect.signature(f).parameters for f in (qkv.varlen_attn, torch_varlen_attn))
    assert list(ours)[: len(torchs)] == list(torchs)
    for name, parameter in torchs.items():
        assert (ours[name].kind, ours[name].default) == (parameter.kind, parameter.default)
    for name in list(ours)[len(torchs) :]:
        assert ours[name].kind == inspect.Parameter.KEYWORD_ONLY


@pytest.mark.usefixtures("isa")
class TestAgainstOneByOne:
    def test_self_attention(self):
        packed = pack([5, 1, 70, 33, 200])
        compare(packed)
        compare((*packed[:4], None, *packed[5:]))

    def test_cross_attention(self):
        compare(pack([5, 40, 7], [64, 3, 90], Dv=12))

    def test_empty_documents(self):
        compare(pack([5, 0, 7, 0], [9, 4, 0, 0]))
        compare(pack([0, 0], [0, 0]))
        compare(pack([]))

    def test_no_query_heads(self):
        """The gradients of key and value are 0, not what was in memory."""
        query, key, value, *rest = pack([5, 9], [7, 8], H=2)
        junk = [torch.full_like(key, NAN) for _ in range(50)]
        del junk
        output = qkv.varlen_attn(query[:, :0], key, value, *rest, enable_gqa=True)
        for g in torch.autograd.grad(output.sum(), (key, value)):
            assert not g.any()

    @pytest.mark.parametrize("window_size", [(-1, 0), (3, 0), (0, 4), (70, 0), (5, 2)])
    def test_window(self, window_size):
        compare(pack([5, 1, 70, 33]), window_size=window_size)
        compare(pack([5, 40, 7, 3], [64, 3, 90, 3]), window_size=window_size)

    def test_grouped_heads(self):
        compare(pack([5, 1, 70], H=6, Hkv=2), enable_gqa=True, window_size=(-1, 0))

    def test_seqused_k(self):
        packed = pack([5, 40, 7, 9], [64, 30, 90, 8])
        compare(packed, seqused_k=torch.tensor([64, 11, 1, 0], dtype=torch.int32))
        compare(packed, seqused_k=torch.tensor([3, 11, 1, 0]), window_size=(4, 1))

    @pytest.mark.parametrize("lead", [(), (4,)])
    def test_slopes_and_sinks(self, lead):
        slopes, sinks = (f(*lead, 2, dtype=torch.float64) for f in (torch.rand, torch.randn))
        options = {"alibi_slopes": slopes.requires_grad_(), "sinks": sinks.requires_grad_()}
        compare(pack([5, 0, 70, 33], [9, 4, 0, 50]), **options)
        compare(pack([5, 1, 70, 33]), **options, softcap=2.0, scale=0.7, window_size=(20, 0))

    @pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
    def test_offsets_of_either_type_and_any_stride(self, dtype):
        packed = list(pack([5, 1, 70]))
        for n in (3, 4):
            packed[n] = torch.stack([packed[n].to(dtype)] * 2, 1)[:, 0]
        compare(packed)

    def test_outside_every_document(self):
        """Rows before the first document and after the last have output 0, lse -inf and gradients
        0."""
        packed = list(pack([3, 5, 70, 2]))
        packed[3] = packed[4] = cumulative([5, 70], start=3)
        compare(packed)
        output, lse = qkv.varlen_attn(*packed, return_aux=LSE)
        outside = torch.ones(80, dtype=torch.bool)
        outside[3:78] = False
        assert (output[outside] == 0).all() and (lse[:, outside] == -INF).all()

    @pytest.mark.parametrize("layout", ["heads first", "interleaved", "sliced"])
    def test_strides(self, layout):
        packed = list(pack([5, 1, 70], H=3))
        for n in range(3):
            x = packed[n].detach()
            if layout == "heads first":
                x = x.transpose(0, 1).contiguous().transpose(0, 1)
            elif layout == "interleaved":
                x = torch.stack([x, x], 2).select(2, 1)
            else:
                x = torch.cat([x, x], 2)[..., 3:11]
            packed[n] = x.requires_grad_()
        compare(packed)

    @settings(max_examples=one_example_in(4))
    @given(
        lengths=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), max_size=9),
        window=st.tuples(st.integers(-1, 20), st.integers(-1, 20)),
        softcap=st.sampled_from([0.0, 0.0, 3.0]),
        with_heads=st.booleans(),
        groups=st.integers(1, 3),
        used=st.booleans(),
        seed=st.integers(0, 1000),
    )
    def test_drawn(self, lengths, window, softcap, with_heads, groups, used, seed):
        torch.manual_seed(seed)
        q_lengths, k_lengths = ([x[n] for x in lengths] for n in (0, 1))
        options = {"window_size": window, "softcap": softcap, "enable_gqa": groups > 1}
        if with_heads:
            options["alibi_slopes"] = torch.rand(groups * 2, dtype=torch.float64)
            options["sinks"] = torch.randn(len(lengths), groups * 2, dtype=torch.float64)
            for name in HEADS:
                options[name].requires_grad_()
        if used:
            options["seqused_k"] = (torch.rand(len(lengths)) * torch.tensor(k_lengths)).int()
        compare(pack(q_lengths, k_lengths, H=2 * groups, Hkv=2), **options)


@pytest.mark.usefixtures("isa")
class TestSameBits:
    def everything(self, packed, seeds):
        results = qkv.varlen_attn(*packed, return_aux=LSE, window_size=(50, 0))
        return [*results, *torch.autograd.grad(results, packed[:3], seeds)]

    def test_any_number_of_threads(self, threads):
        packed = pack([300, 5, 1, 70, 33, 20, 16, 16, 8], dtype=torch.float32)
        T = packed[0].size(0)
        seeds = [torch.randn(T, 2, 8), torch.randn(2, T)]
        threads(1)
        expected = self.everything(packed, seeds)
        for n in (2, 3, 4):
            threads(n)
            for x, y in zip(self.everything(packed, seeds), expected, strict=True):
                assert torch.equal(x, y)

    def test_a_document_does_not_depend_on_the_others(self):
        packed = pack([300, 5, 70], dtype=torch.float32)
        seeds = [torch.randn(375, 2, 8), torch.randn(2, 375)]
        output, lse, *grads = self.everything(packed, seeds)
        alone = [x.detach()[305:].requires_grad_() for x in packed[:3]]
        own = [seeds[0][305:], seeds[1][:, 305:]]
        only = self.everything((*alone, cumulative([70]), None, 70, 70), own)
        assert torch.equal(only[0], output[305:]) and torch.equal(only[1], lse[:, 305:])
        for x, y in zip(only[2:], grads, strict=True):
            assert torch.equal(x, y[305:])


class TestDropout:
    def test_kept_set_counts_documents_as_the_batch(self):
        query, key, value, *rest = pack([30, 5, 41], dtype=torch.float32)
        value = torch.cat([torch.eye(41)[:n] for n in (30, 5, 41)])[:, None].expand(-1, 2, -1)
        torch.manual_seed(3)
        output = qkv.varlen_attn(query, key, value, *rest, dropout_p=0.3)
        torch.manual_seed(3)
        seed = torch.ops.qkv.dropout_seed(query).item()
        kept = testing.dropout_mask(seed, 0.3, (3, 2, 41, 41))
        for n, (begin, end) in enumerate([(0, 30), (30, 35), (35, 76)]):
            found = output[begin:end, :, : end - begin].transpose(0, 1) != 0
            assert torch.equal(found, kept[n, :, : end - begin, : end - begin])

    def test_as_padded(self):
        """Documents of one length give what a batch of them gives."""
        packed = pack([20, 20, 20])
        options = {"dropout_p": 0.3, "window_size": (-1, 0)}
        batch = [x.unflatten(0, (3, 20)).transpose(1, 2) for x in packed[:3]]
        results = []
        for f in (
            lambda: qkv.varlen_attn(*packed, **options),
            lambda: qkv.attention(*batch, **options),
        ):
            torch.manual_seed(5)
            output = f()
            results.append([output, *torch.autograd.grad(output.sin().sum(), packed[:3])])
        results[1][0] = results[1][0].transpose(1, 2).flatten(0, 1)
        torch.testing.assert_close(*results, rtol=1e-11, atol=1e-11)

    def test_gradcheck(self):
        query, key, value, cu_seq_q, cu_seq_k, *_ = pack([3, 1, 5], [2, 4, 3], D=3)
        seed = torch.tensor([9])

        def f(*inputs):
            output, lse = torch.ops.qkv.attention_forward(
                *inputs, *[None] * 5, seed, cu_seq_q, cu_seq_k, None, dropout_p=0.4,
                is_causal=False, scale=None, enable_gqa=False, window_size=(2, 1), softcap=1.5,
            )  # fmt: skip
            return output, lse.masked_fill(lse == -INF, 0)

        assert torch.autograd.gradcheck(f, (query, key, value))


@pytest.mark.parametrize("shape", [(2, 4, 4), (2, 4, 1), (2, 1, 4), (4, 4)])
def test_a_document_without_keys_needs_no_rows_of_a_mask(shape):
    """It has more queries than the mask has rows, and the documents beside it are not touched."""
    packed = pack([3, 90, 4], [4, 0, 4])
    bias = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    without = pack([3, 4], [4, 4])
    outside = torch.ones(97, dtype=torch.bool).index_fill(0, torch.arange(3, 93), False)
    without = (packed[0][outside], *packed[1:3], *without[3:])
    results = []
    for call in (packed, without):
        output, lse = qkv.varlen_attn(*call, bias=bias, return_aux=LSE)
        if call is packed:
            assert (output[~outside] == 0).all() and (lse[:, ~outside] == -INF).all()
            output, lse = output[outside], lse[:, outside]
        loss = output.sin().sum() + lse.sin().sum()
        results.append([output, lse, *torch.autograd.grad(loss, (*packed[:3], bias))])
    for x, y in zip(*results, strict=True):
        assert torch.equal(x, y)


def test_returns():
    packed = pack([5, 1, 70], dtype=torch.float32)
    output = qkv.varlen_attn(*packed)
    assert isinstance(output, torch.Tensor) and output.shape == (76, 2, 8)
    assert torch.equal(qkv.varlen_attn(*packed, return_aux=AuxRequest()), output)
    both = qkv.varlen_attn(*packed, return_aux=LSE)
    assert torch.equal(both[0], output) and both[1].shape == (2, 76)
    assert torch.equal(qkv.varlen_attn(*packed, num_splits=1), output)


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
def test_compile():
    torch.compiler.reset()
    packed = pack([5, 1, 70], dtype=torch.float32)

    def f(*packed):
        return qkv.varlen_attn(*packed, window_size=(-1, 0), dropout_p=0.2).sin()

    compiled = torch.compile(f, backend="aot_eager", fullgraph=True)
    results = []
    for g in (f, compiled):
        torch.manual_seed(1)
        output = g(*packed)
        results.append([output, *torch.autograd.grad(output.sum(), packed[:3])])
    torch.testing.assert_close(*results)


GOOD = pack([5, 7], dtype=torch.float32)[:5]
NAMES = ("query", "key", "value", "cu_seq_q", "cu_seq_k")
INT = torch.int32


@pytest.mark.parametrize("change, message", [
    ({"cu_seq_q": torch.tensor([0, 5, 13], dtype=INT)}, "cu_seq_q ends with 13.*query has only 12"),
    ({"cu_seq_q": torch.tensor([-1, 5, 12], dtype=INT)}, "cu_seq_q begins with -1, but 0"),
    ({"cu_seq_q": torch.tensor([0, 9, 5], dtype=INT)}, "cu_seq_q falls from 9 to 5 at element 2"),
    ({"cu_seq_q": torch.tensor([0, 5, 12.0])}, "cu_seq_q is float32, but int32 or int64"),
    ({"cu_seq_q": torch.tensor([[0, 5, 12]], dtype=INT)}, "cu_seq_q has 2 dimensions, but 1"),
    (
        {"cu_seq_q": torch.tensor([], dtype=INT)},
        r"cu_seq_q has the shape \[0\], but \[N \+ 1\]",
    ),
    (
        {"cu_seq_q": torch.tensor([0, 12], dtype=INT)},
        r"cu_seq_k has the shape \[3\], but cu_seq_q's is expected, \[2\]",
    ),
    ({"cu_seq_k": torch.tensor([0, 5, 13], dtype=INT)}, "cu_seq_k ends with 13.*key has only 12"),
    ({"cu_seq_k": torch.tensor([0, 5, 2**31 - 1], dtype=INT)}, "cu_seq_k ends with 2147483647"),
    ({"cu_seq_k": torch.tensor([0, 2**62, 12])}, "cu_seq_k falls from 4611686018427387904 to 12"),
    ({"cu_seq_k": torch.tensor([0, 5, 12], device="meta")}, "cu_seq_k is on meta"),
    (
        {"seqused_k": torch.tensor([5, 8], dtype=INT)},
        r"seqused_k\[1\] is 8, but document 1 has 7 keys; expected 0 to 7",
    ),
    ({"seqused_k": torch.tensor([5, -1], dtype=INT)}, r"seqused_k\[1\] is -1.*expected 0 to 7"),
    ({"seqused_k": torch.tensor([5], dtype=INT)}, r"seqused_k has the shape \[1\].*\[2\]"),
    ({"seqused_k": torch.tensor([5.0, 7.0])}, "seqused_k is float32, but int32 or int64"),
    ({"max_q": -1}, "max_q is -1"),
    ({"window_size": (-2, 0)}, r"window_size is \(-2, 0\)"),
    ({"query": torch.zeros(12, 8)}, r"query has the shape \[12, 8\], but 3 dimensions"),
    ({"query": torch.zeros(1, 12, 2, 8)}, r"query has the shape \[1, 12, 2, 8\], but 3 dim"),
    ({"key": torch.zeros(12, 2, 7)}, r"key has the shape \[12, 2, 7\].* query's, 8"),
    ({"key": torch.zeros(12, 3, 8)}, "key has 3 heads"),
    ({"value": torch.zeros(11, 2, 8)}, r"value has the shape \[11, 2, 8\].* key's, 12"),
    ({"alibi_slopes": torch.zeros(3, 2)}, r"alibi_slopes has the shape \[3, 2\].*\[2, 2\]"),
    ({"sinks": torch.zeros(3)}, r"sinks has the shape \[3\].*\[2, 2\]"),
    ({"query": torch.zeros(12, 2, 8).half()}, "key is float32, but query is float16"),
])  # fmt: skip
def test_bad_call(change, message):
    arguments = {**dict(zip(NAMES, GOOD, strict=True)), "max_q": 7, "max_k": 7, **change}
    with pytest.raises((RuntimeError, ValueError), match=message):
        qkv.varlen_attn(**arguments)


def in_blocks(packed, block_size):
    """The same documents with their keys and values in blocks, in no order, unused rows NaN:
    (query, key, value, cu_seq_q, None, max_q, max_k), {seqused_k, block_table}"""
    query, key, value, cu_seq_q, cu_seq_k, max_q, max_k = packed
    lengths = cu_seq_k.diff()
    blocks = -(-lengths // block_size)
    columns = -(-max_k // block_size) + 1
    order = torch.randperm(int(blocks.sum()) + 2)
    table = torch.full((len(lengths), columns), -1, dtype=torch.int32)  # -1 is not looked at
    pools = [x.new_full((len(order), block_size, *x.shape[1:]), NAN) for x in (key, value)]
    for n, used in enumerate(blocks):
        table[n, :used], order = order[:used], order[used:]
        rows = torch.arange(int(lengths[n]))
        place = table[n, rows // block_size].long(), rows % block_size
        for pool, x in zip(pools, (key, value), strict=True):
            pool[place] = x.detach()[cu_seq_k[n] : cu_seq_k[n + 1]]
    options = {"seqused_k": lengths, "block_table": table}
    return (query.detach(), *pools, cu_seq_q, None, max_q, max_k), options


def compare_blocks(packed, block_size, **options):
    paged, where = in_blocks(packed, block_size)
    ours = qkv.varlen_attn(*paged, return_aux=LSE, **where, **options)
    truths = testing.varlen_attn(*packed, return_aux=LSE, **options)
    by_blocks = testing.varlen_attn(*paged, return_aux=LSE, **where, **options)
    assert all(map(torch.equal, by_blocks, truths))
    for x, truth in zip(ours, truths, strict=True):
        torch.testing.assert_close(x, truth, rtol=1e-11, atol=1e-11)


@pytest.mark.usefixtures("isa")
class TestBlockTable:
    @pytest.mark.parametrize("block_size", [1, 3, 16, 128])
    def test_as_packed(self, block_size):
        compare_blocks(pack([5, 1, 0, 70], [30, 7, 20, 90]), block_size)
        compare_blocks(pack([5, 1, 2], [30, 0, 20], Dv=3), block_size, window_size=(-1, 0))
        compare_blocks(pack([1, 1], [700, 1300], D=16), block_size, window_size=(-1, 0))

    def test_options(self):
        packed = pack([5, 1, 70], [30, 7, 90], H=6, Hkv=2)
        heads = {"alibi_slopes": torch.rand(3, 6).double(), "sinks": torch.randn(6).double()}
        compare_blocks(
            packed, 4, enable_gqa=True, window_size=(20, 3), softcap=2.0, scale=0.7, **heads
        )

    def test_heads_before_rows(self):
        """Blocks in a pool [blocks, Hkv, block_size, D], as attention_with_kvcache has it."""
        paged, where = in_blocks(pack([5, 1, 70], [30, 7, 90]), 4)
        expected = qkv.varlen_attn(*paged, **where)
        other = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in paged[1:3]]
        assert torch.equal(qkv.varlen_attn(paged[0], *other, *paged[3:], **where), expected)

    def test_outside_every_document(self):
        paged, where = in_blocks(pack([3, 5, 70, 2]), 4)
        where = {n: x[1:3] for n, x in where.items()}
        output, lse = qkv.varlen_attn(
            *paged[:3], paged[3][1:4], *paged[4:], return_aux=LSE, **where
        )
        assert (output[[0, 2, -1]] == 0).all() and (lse[:, [0, 2, -1]] == -INF).all()
        assert lse[:, 3:78].isfinite().all()

    @pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
    def test_compile(self):
        torch.compiler.reset()
        paged, where = in_blocks(pack([5, 1, 70], [30, 7, 90]), 4)
        compiled = torch.compile(qkv.varlen_attn, backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(compiled(*paged, **where), qkv.varlen_attn(*paged, **where))

    @pytest.mark.bf16
    def test_autocast(self):
        paged, where = in_blocks(pack([5, 7], dtype=torch.float32), 4)
        half = [x.bfloat16() for x in paged[:3]]
        expected = qkv.varlen_attn(*half, *paged[3:], **where)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert torch.equal(qkv.varlen_attn(*paged, **where), expected)

    def test_inference_only(self):
        paged, where = in_blocks(pack([5, 7]), 4)
        paged[1].requires_grad_()
        with pytest.raises(RuntimeError, match="key requires grad.*block_table.*no_grad"):
            qkv.varlen_attn(*paged, **where)
        with torch.no_grad():
            qkv.varlen_attn(*paged, **where)
            with pytest.raises(ValueError, match="dropout_p is 0.1.*block_table"):
                qkv.varlen_attn(*paged, **where, dropout_p=0.1)


PAGED, WHERE = in_blocks(pack([5, 7], dtype=torch.float32), 4)


@pytest.mark.parametrize("change, message", [
    ({"seqused_k": None}, "seqused_k is None"),
    ({"seqused_k": torch.tensor([5, -1])}, r"seqused_k\[1\] is -1"),
    ({"seqused_k": torch.tensor([5, 13])}, "block_table has 3 columns.*4 blocks of 4 rows"),
    ({"seqused_k": torch.tensor([5, 12])}, r"block_table\[1, 2\] is -1, but key has 6 blocks"),
    ({"block_table": torch.tensor([[0, 1], [2, 6]])}, r"block_table\[1, 1\] is 6, but key has 6"),
    ({"block_table": torch.tensor([[0, 1]])}, r"block_table has the shape \[1, 2\].*\[2, 2\]"),
    ({"block_table": torch.tensor([0, 1])}, r"block_table has the shape \[2\].*2 dim"),
    ({"block_table": torch.zeros(2, 2)}, "block_table is float32"),
    ({"key": torch.zeros(6, 4, 2, 7)}, r"key has the shape \[6, 4, 2, 7\].*\[6, 4, 2, 8\]"),
    ({"key": torch.zeros(24, 2, 8)}, r"key has the shape \[24, 2, 8\].*4 dim"),
    ({"value": torch.zeros(5, 4, 2, 8)}, r"value has the shape \[5, 4, 2, 8\]"),
    ({"key": torch.zeros(6, 4, 1, 8), "value": torch.zeros(6, 4, 1, 8)}, "key has 1 heads and que"),
    ({"cu_seq_q": torch.tensor([0, 5, 13])}, "cu_seq_q ends with 13"),
])  # fmt: skip
def test_bad_block_table(change, message):
    arguments = dict(zip((*NAMES, "max_q", "max_k"), PAGED, strict=True)) | WHERE | change
    with pytest.raises((RuntimeError, ValueError), match=message):
        qkv.varlen_attn(**arguments)
