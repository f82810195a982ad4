"""Every bad call is told which argument is wrong, what it was and what it may be."""

import math
import warnings

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

NAN, INF = float("nan"), float("inf")


def zeros(*shape, dtype=torch.float32, **options):
    return torch.zeros(shape, dtype=dtype, **options)


def nested(layout):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # strided ones are deprecated
        return torch.nested.nested_tensor([zeros(4, 5, 8), zeros(4, 6, 8)], layout=layout)


Q = zeros(2, 4, 5, 8)
GOOD = {"query": Q, "key": Q, "value": Q}
# name: (the arguments that differ from GOOD, the exception, a text that its message has)
CASES = {
    "query 1-D": ({"query": zeros(8)}, RuntimeError, r"query has the shape \[8\].* 2 dim"),
    "key 0-D": ({"key": zeros()}, RuntimeError, r"key has the shape \[\].* 2 dim"),
    "value 1-D": ({"value": zeros(8)}, RuntimeError, r"value has the shape \[8\].* 2 dim"),
    "head_dim": (
        {"key": zeros(2, 4, 5, 7)}, RuntimeError,
        r"key has the shape \[2, 4, 5, 7\].* query's, 8",
    ),
    "seqlen_k": (
        {"value": zeros(2, 4, 6, 8)}, RuntimeError,
        r"value has the shape \[2, 4, 6, 8\].* key's, 5",
    ),
    "batch of key": ({"key": zeros(3, 4, 5, 8)}, RuntimeError, r"query.*\[3, 4, 5, 8\].*broadcast"),
    "batch of value": ({"value": zeros(3, 4, 5, 8)}, RuntimeError, r"value \[3, 4, 5, 8\]"),
    "outer batch": (
        {"query": zeros(2, 1, 4, 5, 8), "key": zeros(3, 2, 4, 5, 8)}, RuntimeError,
        r"query \[2, 1, 4, 5, 8\], key \[3, 2, 4, 5, 8\].* do not broadcast",
    ),
    "heads of key": ({"key": zeros(2, 2, 5, 8)}, RuntimeError, "key has 2 heads and query 4"),
    "heads of value": ({"value": zeros(2, 2, 5, 8)}, RuntimeError, "value has 2 heads.* 4"),
    "heads that do not divide": (
        {"key": zeros(2, 3, 5, 8), "enable_gqa": True}, RuntimeError,
        "key has 3 heads and query 4.*divide",
    ),
    "value heads that do not divide": (
        {"value": zeros(2, 3, 5, 8), "enable_gqa": True}, RuntimeError,
        "value has 3 heads and query 4.*divide",
    ),
    "more key heads than query heads": (
        {"key": zeros(2, 8, 5, 8), "enable_gqa": True}, RuntimeError, "key has 8 heads and query 4",
    ),
    "no key heads": (
        {"key": zeros(2, 0, 5, 8), "enable_gqa": True}, RuntimeError, "key has 0 heads and query 4",
    ),
    "int64": (dict.fromkeys(GOOD, Q.long()), RuntimeError, "query is int64.*float32, float64, bf"),
    "bool": (dict.fromkeys(GOOD, Q.bool()), RuntimeError, "query is bool.*bfloat16 or float16"),
    "complex": (dict.fromkeys(GOOD, Q.cfloat()), RuntimeError, "query is complex64.*float32, "),
    "float8": (
        dict.fromkeys(GOOD, Q.to(torch.float8_e4m3fn)), RuntimeError,
        "query is float8_e4m3fn.*float32, float64, bfloat16 or float16",
    ),
    "mixed key": ({"key": Q.double()}, RuntimeError, "key is float64, but query is float32"),
    "mixed value": ({"value": Q.double()}, RuntimeError, "value is float64, but query is float32"),
    "half key": ({"key": Q.half()}, RuntimeError, "key is float16, but query is float32"),
    "half query": ({"query": Q.bfloat16()}, RuntimeError, "key is float32, but query is bfloat16"),
    "half value": ({"value": Q.half()}, RuntimeError, "value is float16, but query is float32"),
    "two halves": (
        {"query": Q.half(), "key": Q.half(), "value": Q.bfloat16()}, RuntimeError,
        "value is bfloat16, but query is float16",
    ),
    "mask too long": (
        {"attn_mask": zeros(5, 6)}, RuntimeError,
        r"attn_mask has the shape \[5, 6\].*\[2, 4, 5, 5\]",
    ),
    "mask with more batches": (
        {"attn_mask": zeros(3, 1, 5, 5)}, RuntimeError, r"attn_mask has the shape \[3, 1, 5, 5\]",
    ),
    "mask with more dimensions": (
        {"attn_mask": zeros(1, 2, 4, 5, 5)}, RuntimeError, r"attn_mask has.*\[1, 2, 4, 5, 5\]",
    ),
    "empty mask": (
        {"attn_mask": zeros(5, 0)}, RuntimeError, r"attn_mask has the shape \[5, 0\]",
    ),
    "int mask": ({"attn_mask": zeros(5, 5).int()}, RuntimeError, "attn_mask is int32.*bool"),
    "uint8 mask": ({"attn_mask": zeros(5, 5).byte()}, RuntimeError, "attn_mask is uint8.*bool"),
    "half mask": ({"attn_mask": zeros(5, 5).half()}, RuntimeError, "attn_mask is float16.*bool"),
    "other half mask": (
        {**dict.fromkeys(GOOD, Q.half()), "attn_mask": zeros(5, 5).bfloat16()}, RuntimeError,
        r"attn_mask is bfloat16.*bool, float32 or query's dtype \(float16\)",
    ),
    "f64 mask of halves": (
        {**dict.fromkeys(GOOD, Q.bfloat16()), "attn_mask": zeros(5, 5).double()}, RuntimeError,
        r"attn_mask is float64.*bool, float32 or query's dtype \(bfloat16\)",
    ),
    "f64 mask": ({"attn_mask": zeros(5, 5).double()}, RuntimeError, "attn_mask is float64"),
    "complex mask": ({"attn_mask": zeros(5, 5).cfloat()}, RuntimeError, "attn_mask is complex64"),
    "nan scale": ({"scale": NAN}, ValueError, "scale is nan.*finite"),
    "infinite scale": ({"scale": INF}, ValueError, "scale is inf.*finite"),
    "-infinite scale": ({"scale": -INF}, ValueError, "scale is -inf.*finite"),
    "negative dropout": ({"dropout_p": -0.1}, ValueError, "dropout_p is -0.1.*between 0 and 1"),
    "dropout above 1": ({"dropout_p": 1.5}, ValueError, "dropout_p is 1.5.*between 0 and 1"),
    "dropout just above 1": ({"dropout_p": 1 + 1e-9}, ValueError, r"dropout_p is 1\.000000001,"),
    "nan dropout": ({"dropout_p": NAN}, ValueError, "dropout_p is nan.*between 0 and 1"),
    "negative softcap": ({"softcap": -1.0}, ValueError, "softcap is -1.*above 0, or 0 for none"),
    "nan softcap": ({"softcap": NAN}, ValueError, "softcap is nan"),
    "infinite softcap": ({"softcap": INF}, ValueError, "softcap is inf"),
    "window of -2": ({"window_size": (-2, 0)}, ValueError, r"window_size is \(-2, 0\).*-1"),
    "window of least": ({"window_size": (0, -(2**63))}, ValueError, r"window_size is \(0, -9223"),
    "slopes of other heads": (
        {"alibi_slopes": zeros(3)}, RuntimeError, r"alibi_slopes has the shape \[3\].*\[2, 4\]",
    ),
    "slopes of other batches": (
        {"alibi_slopes": zeros(3, 4)}, RuntimeError, r"alibi_slopes has the shape \[3, 4\]",
    ),
    "slopes with more dimensions": (
        {"alibi_slopes": zeros(1, 2, 4)}, RuntimeError, r"alibi_slopes has the shape \[1, 2, 4\]",
    ),
    "int slopes": ({"alibi_slopes": zeros(4).int()}, RuntimeError, "alibi_slopes is int32.*float"),
    "complex slopes": ({"alibi_slopes": zeros(4).cfloat()}, RuntimeError, "alibi_slopes is compl"),
    "sparse slopes": (
        {"alibi_slopes": zeros(4).to_sparse()}, RuntimeError, "alibi_slopes has the layout Sparse",
    ),
    "meta slopes": ({"alibi_slopes": zeros(4, device="meta")}, RuntimeError, "alibi_slopes is on"),
    "sinks of other heads": (
        {"sinks": zeros(5)}, RuntimeError, r"sinks has the shape \[5\].*\[2, 4\]",
    ),
    "bool sinks": ({"sinks": zeros(4).bool()}, RuntimeError, "sinks is bool.*float"),
    "sinks a query": ({"sinks": zeros(4, 5)}, RuntimeError, r"sinks has the shape \[4, 5\]"),
    "meta sinks": ({"sinks": zeros(4, device="meta")}, RuntimeError, "sinks is on meta, but query"),
    "empty sinks": ({"sinks": zeros(0)}, RuntimeError, r"sinks has the shape \[0\]"),
    "meta key": ({"key": Q.to("meta")}, RuntimeError, "key is on meta, but query is on cpu"),
    "meta query": ({"query": Q.to("meta")}, RuntimeError, "key is on cpu, but query is on meta"),
    "meta value": ({"value": Q.to("meta")}, RuntimeError, "value is on meta, but query is on cpu"),
    "meta mask": (
        {"attn_mask": zeros(5, 5, device="meta")}, RuntimeError, "attn_mask is on meta.*query",
    ),
    "sparse query": ({"query": Q.to_sparse()}, RuntimeError, "query has the layout Sparse.*dense"),
    "sparse key": ({"key": Q.to_sparse()}, RuntimeError, "key has the layout Sparse.*dense"),
    "sparse value": ({"value": Q.to_sparse()}, RuntimeError, "value has the layout Sparse.*dense"),
    "sparse mask": (
        {"attn_mask": zeros(5, 5).to_sparse()}, RuntimeError, "attn_mask has the layout Sparse",
    ),
    "mkldnn query": ({"query": Q.to_mkldnn()}, RuntimeError, "query has the layout Mkldnn.*dense"),
    "nested query": (
        {"query": nested(torch.strided)}, RuntimeError,
        "query is a nested tensor.*dense",
    ),
    "jagged value": (
        {"value": nested(torch.jagged)}, RuntimeError,
        "value is a nested tensor.*dense",
    ),
    "too many scores": (
        {"query": zeros(1).expand(2**40, 1), "key": zeros(1).expand(2**40, 1),
         "value": zeros(1).expand(2**40, 1)}, RuntimeError,
        r"query, key and value are too large.*\[1099511627776, 1099511627776\]",
    ),
    "too many batches": (
        dict.fromkeys(GOOD, zeros(1).expand(2**30, 2**28, 4, 4)), RuntimeError, "too large",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("op", ["attention", "attention_with_lse"])
def test_bad_call(case, op):
    change, exception, message = CASES[case]
    with pytest.raises(exception, match=f"(?s){op.split('_')[0]}.*{message}") as caught:
        getattr(torch.ops.qkv, op)(**{**GOOD, **change})
    assert caught.type is exception


def can_be_fake(x):
    return type(x) is torch.Tensor and x.layout == torch.strided and not x.is_nested | x.is_meta


@pytest.mark.parametrize("case", [
    name for name, (change, _, _) in CASES.items()
    if all(can_be_fake(x) for x in change.values() if isinstance(x, torch.Tensor))
])  # fmt: skip
def test_bad_call_under_compile(case):
    """The Meta kernel refuses what the CPU kernel refuses, in the same words. Not with a
    NotImplementedError, though: FakeTensor hides its text."""
    change, _, message = CASES[case]
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = {
            name: mode.from_tensor(x) if isinstance(x, torch.Tensor) else x
            for name, x in {**GOOD, **change}.items()
        }
        with pytest.raises((RuntimeError, ValueError), match=f"(?s){message}"):
            torch.ops.qkv.attention(**fake)


def test_good_call():
    """The call that all cases above change is good, so none of them fails for another reason."""
    assert torch.ops.qkv.attention(**GOOD).shape == Q.shape


def test_nine_batch_dimensions_that_do_not_merge():
    q = torch.zeros([2, 1] * 9 + [3, 4])
    k = torch.zeros([1, 2] * 9 + [3, 4])
    with pytest.raises(RuntimeError, match="more than 8 leading dimensions.*contiguous"):
        torch.ops.qkv.attention(q, k, k)


def test_memory_that_cannot_be_had():
    """An output of 2^47 bytes gives torch's own error, not a crash; a workspace one of ours."""
    x = torch.zeros(1).expand(2**22, 2**10, 1, 2**13)
    with pytest.raises(RuntimeError, match="memory"):
        torch.ops.qkv.attention(x, x, x)
    key = zeros(1, 0).expand(2**50, 0)
    for grad in (False, True):
        query = zeros(4, 0).requires_grad_(grad)
        with pytest.raises(RuntimeError, match=r"no memory.*key is \[1125899906842624, 0\]"):
            torch.ops.qkv.attention(query, key, key)


LOW_LEVEL = {
    **GOOD, "attn_mask": None, "bias": None, "spans": None, "alibi_slopes": None, "sinks": None,
    "dropout_seed": None, "cu_seq_q": None, "cu_seq_k": None, "seqused_k": None, "dropout_p": 0.0,
    "is_causal": False, "scale": None, "enable_gqa": False, "window_size": None, "softcap": 0.0,
}  # fmt: skip


class TestForward:
    """The forward operator, which takes the seed of dropout and packed documents."""

    @pytest.mark.parametrize("change, message", [
        ({"dropout_p": 0.1}, "dropout_seed is None, but dropout_p is 0.1"),
        ({"dropout_p": 0.1, "dropout_seed": zeros(1)}, "dropout_seed is float32"),
        ({"dropout_p": 0.1, "dropout_seed": zeros(3).long()}, r"dropout_seed has.*\[3\], but \[1"),
        ({"dropout_p": 0.1, "dropout_seed": zeros(0).long()}, r"dropout_seed has.*\[0\], but \[1"),
        ({"dropout_p": 0.1, "dropout_seed": zeros(1, device="meta").long()}, "dropout_seed is on"),
        ({"cu_seq_k": torch.tensor([0, 5])}, "cu_seq_k is given, but cu_seq_q is None"),
        ({"seqused_k": torch.tensor([5])}, "seqused_k is given, but cu_seq_q is None"),
        (
            {**dict.fromkeys(GOOD, zeros(5, 4, 8)), "cu_seq_q": torch.tensor([0, 5]),
             "attn_mask": zeros(5, 3)},
            r"attn_mask has the shape \[5, 3\], but document 0 has 5 queries and 5 keys",
        ),
    ])  # fmt: skip
    def test_bad_call(self, change, message):
        with pytest.raises(RuntimeError, match=message):
            torch.ops.qkv.attention_forward(**{**LOW_LEVEL, **change})


class TestBackward:
    """The gradient operator checks its own arguments too: anyone may call it."""

    def call(self, **change):
        output, lse = torch.ops.qkv.attention_with_lse(Q, Q, Q)
        arguments = {
            "grad_output": output, "grad_logsumexp": None, **LOW_LEVEL, "output": output,
            "logsumexp": lse, "output_mask": [True] * 8,
        }  # fmt: skip
        return torch.ops.qkv.attention_backward(**{**arguments, **change})

    def test_good_call(self):
        gradients = self.call()
        assert [g.shape for g in gradients[:3]] == [Q.shape] * 3 and gradients[3:] == (None,) * 5

    def test_the_lse_of_halves_is_f32(self):
        halves = dict.fromkeys([*GOOD, "grad_output", "output"], Q.half())
        lse = zeros(2, 4, 5)
        assert self.call(**halves, logsumexp=lse)[0].dtype == torch.float16
        with pytest.raises(RuntimeError, match="logsumexp is float16, but float32 is expected"):
            self.call(**halves, logsumexp=lse.half())
        with pytest.raises(RuntimeError, match="grad_output is float32, but float16 is expected"):
            self.call(**{**halves, "grad_output": Q}, logsumexp=lse)

    def test_bool_mask_has_no_gradient(self):
        gradients = self.call(attn_mask=torch.ones(5, 5, dtype=torch.bool))
        assert [g is None for g in gradients] == [False] * 3 + [True] * 5

    def test_output_mask_of_another_length(self):
        with pytest.raises(ValueError, match="output_mask has 6 elements, but 8 are expected"):
            self.call(output_mask=[True] * 6)

    @pytest.mark.parametrize("change, message", [
        ({"grad_output": zeros(2, 4, 5, 7)}, r"grad_output has.*\[2, 4, 5, 7\].*\[2, 4, 5, 8\]"),
        ({"grad_output": Q.double()}, "grad_output is float64, but float32"),
        ({"grad_logsumexp": zeros(2, 4, 6)}, r"grad_logsumexp has.*\[2, 4, 6\].*\[2, 4, 5\]"),
        ({"output": zeros(2, 4, 5)}, r"output has the shape \[2, 4, 5\]"),
        ({"logsumexp": zeros(2, 4, 5).double()}, "logsumexp is float64"),
        ({"logsumexp": zeros(2, 4, 5).half()}, "logsumexp is float16, but float32"),
        ({"grad_logsumexp": zeros(2, 4, 5).half()}, "grad_logsumexp is float16, but float32"),
        ({"grad_output": Q.to_sparse()}, "grad_output has the layout Sparse"),
        ({"grad_output": Q.to("meta")}, "grad_output is on meta"),
        ({"query": None}, "query is an undefined tensor"),
        ({"key": zeros(2, 4, 5, 7)}, "key has the shape"),
        ({"dropout_p": 0.1}, "dropout_seed is None, but dropout_p is 0.1"),
        ({"sinks": zeros(3)}, "sinks has the shape"),
    ])  # fmt: skip
    def test_bad_call(self, change, message):
        with pytest.raises(RuntimeError, match=message):
            self.call(**change)


def test_largest_finite_scale_is_fine():
    output = torch.ops.qkv.attention(Q, Q, Q, scale=-math.ldexp(1, 100))
    assert output.isfinite().all()
