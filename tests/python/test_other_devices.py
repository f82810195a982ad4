"""Tensors elsewhere than on the CPU: torch's own attention where it can express the call, else an
error that says what cannot be expressed. With fake tensors, which need no such device."""

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

import qkv
from qkv import Spans
from qkv.nn.kvcache import KVCache

ELSEWHERE = ("cuda", "xpu", "mps")


@pytest.fixture(params=ELSEWHERE)
def device(request):
    """Within this fixture tensors may be made on a device that this host lacks."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        yield request.param


def make(device, dtype=torch.float32):
    """query, key and value, of different lengths and numbers of columns."""
    shapes = [(2, 4, 5, 8), (2, 4, 7, 8), (2, 4, 7, 3)]
    return [torch.empty(s, device=device, dtype=dtype) for s in shapes]


def describe(x):
    return x.shape, x.dtype, x.device, x.stride()


def outcome(call):
    """The description of the result, or torch's error: a torch for CPUs lacks some devices'
    kernels."""
    try:
        return describe(call())
    except RuntimeError as error:
        return type(error), str(error).splitlines()[0]


@pytest.mark.parametrize("options", [
    {}, {"is_causal": True}, {"attn_mask": torch.float32}, {"attn_mask": torch.bool},
    {"dropout_p": 0.1}, {"scale": 0.3},
], ids=str)  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_torchs_attention(device, options, dtype):
    options = dict(options)
    if (kind := options.get("attn_mask")) is not None:
        kind = dtype if kind == torch.float32 else kind
        options["attn_mask"] = torch.empty(5, 7, device=device, dtype=kind)
    x = make(device, dtype)
    found = outcome(lambda: qkv.attention(*x, **options))
    assert found == outcome(lambda: F.scaled_dot_product_attention(*x, **options))
    if device == "cuda":
        assert found[:2] == ((2, 4, 5, 3), dtype) and found[2].type == device


@pytest.mark.parametrize("option, what", [
    (lambda on: {"attn_mask": on(5, 7), "is_causal": True},
     "combine attn_mask with is_causal; pass one mask"),
    (lambda on: {"window_size": (1, 1)}, "do window_size; pass an attn_mask"),
    (lambda on: {"spans": on(5, 2).int()}, "do spans; pass an attn_mask"),
    (lambda on: {"softcap": 1.0}, "do softcap"),
    (lambda on: {"alibi_slopes": on(4)}, "do alibi_slopes; pass an attn_mask"),
    (lambda on: {"sinks": on(4)}, "do sinks"),
    (lambda on: {"return_lse": True}, "return the log-sum-exp"),
], ids=["both masks", "window", "spans", "softcap", "alibi", "sinks", "lse"])  # fmt: skip
def test_what_cannot_be_expressed(device, option, what):
    x = make(device)
    options = option(lambda *shape: torch.empty(shape, device=device))
    message = f"query is on {device}.*, where torch's attention computes the result, and that can"
    with pytest.raises(NotImplementedError, match=f"attention: {message}not {what}$"):
        qkv.attention(*x, **options)


def operators(query, key, value):
    """A call of every other operator, and the name that its messages have for it."""
    ends = torch.tensor([0, 5], device=query.device)
    packed = torch.empty(5, 4, 8, device=query.device)
    scores = {
        "dropout_p": 0.0, "is_causal": False, "scale": None, "enable_gqa": False,
        "window_size": None, "softcap": 0.0,
    }  # fmt: skip
    low = (query, key, value, *[None] * 9)
    return {
        "attention_jvp": lambda: qkv.attention_jvp(query, key, value, query_tangent=query),
        "varlen_attention": lambda: qkv.varlen_attn(*[packed] * 3, ends, None, 5, 5),
        "attention_weights": lambda: qkv.attention_weights(query, key),
        "hard_attention": lambda: qkv.hard_attention(query, key, value),
        "attention_with_kvcache": lambda: qkv.attention_with_kvcache(query, key, value),
        "attention": lambda: torch.ops.qkv.attention_forward(*low, **scores),
    }


@pytest.mark.parametrize("name", operators(*[torch.empty(0)] * 3))
def test_other_operators(device, name):
    call = operators(*make(device))[name]
    expected = f"{name}: query is on {device}.*, but it is computed on the CPU only"
    with pytest.raises(NotImplementedError, match=expected):
        call()


@pytest.mark.parametrize("name", ["query", "key", "value", "attn_mask"])
def test_one_tensor_on_the_cpu(device, name):
    call = dict(zip(("query", "key", "value"), make(device), strict=True))
    call["attn_mask"] = torch.empty(5, 7, device=device)
    call[name] = torch.empty(call[name].shape)
    first = "key is on .*, but query is on cpu"
    expected = first if name == "query" else f"{name} is on cpu, but query is on {device}"
    with pytest.raises(RuntimeError, match=f"attention: {expected}"):
        qkv.attention(**call)


class TestMeta:
    """Meta tensors give shapes, dtypes and strides of every operator. attention has more tests in
    test_compile.py."""

    def test_operators(self):
        real = [torch.randn(2, 4, n, 8) for n in (5, 7, 7)]
        meta = [x.to("meta") for x in real]
        names = ("attention_jvp", "attention_weights", "hard_attention", "attention_with_kvcache")
        for name in (*names, "attention"):
            found, expected = operators(*meta)[name](), operators(*real)[name]()
            if torch.is_tensor(found):
                found, expected = (found,), (expected,)
            for x, y in zip(found, expected, strict=True):
                assert x.is_meta and describe(x)[:2] == describe(y)[:2]
                assert x.stride() == y.stride()

    def test_one_tensor_on_the_cpu(self):
        x = [torch.empty(2, 4, 5, 8, device="meta") for _ in range(3)]
        for place, name in ((1, "key"), (2, "value")):
            mixed = list(x)
            mixed[place] = torch.empty(2, 4, 5, 8)
            with pytest.raises(RuntimeError, match=f"{name} is on cpu, but query is on meta"):
                qkv.attention(*mixed)


MASK = torch.ones(6, 6, dtype=torch.bool).tril()
IDS = torch.tensor([0, 0, 1, 1, 1, 2])
OF_THE_CPU = {
    "documents": lambda: Spans.documents(IDS).tensor,
    "groups": lambda: Spans.groups(IDS).tensor,
    "prefix": lambda: Spans.prefix(torch.tensor([2], device="cpu"), 6).tensor,
    "tree": lambda: Spans.tree(IDS - 1).tensor,
    "from_mask": lambda: Spans.from_mask(MASK).tensor,
    "from_block_mask": lambda: Spans.from_block_mask(BLOCK_MASK).tensor,
    "to_mask": lambda: Spans.from_mask(MASK).to_mask(6),
    "block_mask": lambda: qkv.block_mask(lambda b, h, q, k: q >= k, 1, 1, 300, 300).kv_indices,
    "new_cache": lambda: qkv.new_cache((2, 3)),
    "lengths of a cache": lambda: KVCache.empty(2, 1, 9, 4, torch.int8).lengths,
    "scales of a cache": lambda: KVCache.empty(2, 1, 9, 4, torch.int8).k_scale,
    "blocks of a cache": lambda: KVCache.empty(2, 1, 9, 4, torch.int8, 3).block_table,
}
BLOCK_MASK = qkv.block_mask(lambda b, h, q, k: q >= k, 1, 1, 300, 300)


@pytest.mark.parametrize("name", OF_THE_CPU)
def test_the_default_device_is_not_asked(name):
    """What is made of the CPU's tensors, or is for the CPU alone, is the CPU's."""
    expected = OF_THE_CPU[name]()
    with torch.device("meta"):
        found = OF_THE_CPU[name]()
    assert torch.equal(found, expected)  # which a tensor without numbers never is
