"""qkv.set_reproducible: the same bits on every instruction set, for any number of queries at once,
and under every door. That kernels keep the promise is held by tests/csrc/test_fixed_bits.cpp, and
for operators by `tests/truth --reproducible`."""

import os
import subprocess
import sys

import pytest
import torch

import qkv
from qkv.testing import bits

MODE = "has other bits on other CPUs, but the same are asked for"


@pytest.fixture(autouse=True)
def _as_before():
    with qkv.reproducible():
        yield


@pytest.fixture(scope="module")
def table():
    """That of docs/determinism.md."""
    text = (bits_page := page("determinism.md"))[bits_page.index("float32    ") :]
    return dict(line.rsplit(maxsplit=1) for line in text[: text.index("```")].splitlines())


def page(name):
    from bench_runs import ROOT

    return (ROOT / "docs" / name).read_text()


@pytest.mark.parametrize("name", bits.CALLS)
def test_the_table(isa, table, name):
    assert bits.digest(bits.CALLS[name]()) == table[name]


@pytest.mark.parametrize("threads", [1, 3, 7])
def test_the_gradient_of_a_table_has_the_same_bits_on_any_number_of_threads(isa, table, threads):
    name, before = "a score function, its table", torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert bits.digest(bits.CALLS[name]()) == table[name]
    finally:
        torch.set_num_threads(before)


def test_the_table_is_what_the_program_prints(table):
    command = [sys.executable, "-m", "qkv.testing.bits"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert dict(line.rsplit(maxsplit=1) for line in printed.splitlines()) == table


def test_a_digest_sees_the_last_bit():
    x = bits.numbers("x", 100)
    other = x.clone()
    other[7] = torch.nextafter(x[7], x[8])
    assert bits.digest((x,)) == bits.digest((x.clone(),)) != bits.digest((other,))
    assert bits.digest((torch.tensor([0.0]),)) == bits.digest((torch.tensor([-0.0]),))
    assert x.unique().numel() == 100
    assert abs(bits.numbers("x", 10_000).std() - 2 / 3**0.5) < 0.04  # five standard deviations


def inputs(L, S, dtype=torch.float32, heads=(8, 2)):
    return [
        bits.numbers(name, 2, h, n, 64, dtype=dtype)
        for name, h, n in (("query", heads[0], L), ("key", heads[1], S), ("value", heads[1], S))
    ]


@pytest.mark.bf16
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("page_size", [0, 16, 48])
@pytest.mark.parametrize("step", [1, 3, 20])
def test_steps_with_a_cache_repeat_the_prefill(isa, dtype, page_size, step):
    query, key, value = inputs(150, 150, dtype)
    expected = qkv.attention(query, key, value, is_causal=True, enable_gqa=True)
    shape = (8, 2, page_size, 64) if page_size else (2, 2, 192, 64)
    caches = [torch.zeros(shape, dtype=dtype) for _ in "kv"]
    table = torch.arange(8, dtype=torch.int32).view(2, 4) if page_size == 48 else None
    if page_size == 16:
        caches = [torch.zeros(24, 2, 16, 64, dtype=dtype) for _ in "kv"]
        table = torch.arange(24, dtype=torch.int32).view(12, 2).mT.contiguous()
    for begin in range(0, 150, step):
        now = slice(begin, min(150, begin + step))
        output = qkv.attention_with_kvcache(
            query[:, :, now], *caches, key[:, :, now], value[:, :, now],
            cache_seqlens=torch.full((2,), begin), causal=True, block_table=table,
        )  # fmt: skip
        assert torch.equal(output, expected[:, :, now]), begin


def test_int8_steps_repeat_an_int8_prefill(isa):
    query, key, value = inputs(100, 100)
    outputs = []
    for step in (100, 1, 7):
        caches = [torch.zeros(2, 2, 128, 64, dtype=torch.int8) for _ in "kv"]
        scales = {name: torch.zeros(2, 2, 128) for name in ("k_scale", "v_scale")}
        steps = [
            qkv.attention_with_kvcache(
                query[:, :, i : i + step], *caches, key[:, :, i : i + step],
                value[:, :, i : i + step], cache_seqlens=torch.full((2,), i), causal=True, **scales,
            )
            for i in range(0, 100, step)
        ]  # fmt: skip
        outputs.append(torch.cat(steps, -2))
    assert torch.equal(outputs[0], outputs[1]) and torch.equal(outputs[0], outputs[2])


def test_packed_documents_are_what_they_are_alone(isa):
    query, key, value = (x[0].transpose(0, 1) for x in inputs(150, 150, heads=(4, 4)))
    ends = torch.tensor([0, 40, 41, 150], dtype=torch.int32)
    packed = qkv.varlen_attn(query, key, value, ends, ends, 109, 109, window_size=(-1, 0))
    for begin, end in zip(ends[:-1], ends[1:], strict=True):
        alone = (x[begin:end].transpose(0, 1)[None] for x in (query, key, value))
        assert torch.equal(
            packed[begin:end], qkv.attention(*alone, is_causal=True)[0].transpose(0, 1)
        )


def test_right_padding_in_a_batch(isa):
    query, key, value = inputs(90, 90)
    mask = torch.arange(90) < torch.tensor([90, 50])[:, None, None, None]
    padded = qkv.attention(query, key, value, attn_mask=mask, enable_gqa=True)
    alone = [x[1:, :, :50] for x in (query, key, value)]
    assert torch.equal(padded[1:, :, :50], qkv.attention(*alone, enable_gqa=True))


def gradients(forward, backward):
    leaves = [x.requires_grad_() for x in inputs(90, 90, torch.bfloat16)]
    with qkv.reproducible(forward):
        output = qkv.attention(*leaves, enable_gqa=True)
    with qkv.reproducible(backward):
        return torch.autograd.grad(output, leaves, output.detach())


@pytest.mark.bf16
@pytest.mark.parametrize("forward", [True, False])
def test_a_backward_pass_has_the_law_of_its_forward_pass(isa, forward):
    pairs = zip(gradients(forward, forward), gradients(forward, not forward), strict=True)
    assert all(torch.equal(x, y) for x, y in pairs)


@pytest.mark.parametrize("door", ["compile", "replace_sdpa", "indices", "nn"])
def test_doors(door):
    """Under each of them, the same on two instruction sets, which otherwise differ."""

    def outcome():
        query, key, value = inputs(90, 90, heads=(4, 4))
        if door == "compile":
            return torch.compile(qkv.attention, backend="aot_eager")(query, key, value)
        if door == "replace_sdpa":
            with qkv.replace_sdpa():
                return torch.nn.functional.scaled_dot_product_attention(query, key, value)
        if door == "indices":
            chosen = torch.arange(90).view(1, 1, 90)[..., ::3].expand(2, 90, 30)
            return qkv.attention(query, key, value, indices=chosen)
        layer = qkv.nn.AdditiveAttention(8, 8, 8)
        return layer(query[0, 0, :, :8], key[0, 0, :, :8], value[0, 0])

    def everywhere():
        found = []
        for isa in ("generic", qkv.supported_isas()[0]):
            qkv.set_isa(isa)
            torch.manual_seed(0)
            found.append(outcome())
        return found

    try:
        with qkv.reproducible(False):
            differ = everywhere() if door != "nn" else [torch.zeros(1), torch.ones(1)]
        same = everywhere()
    finally:
        qkv.set_isa(qkv.supported_isas()[0])
    assert torch.equal(*same) and not torch.equal(*differ)


def row_by_row(linear):
    """Torch's linear layers have other bits for another number of rows; these have not."""

    def forward(x):
        rows = [torch.mv(linear.weight, row) for row in x.reshape(-1, x.shape[-1])]
        return torch.stack(rows).view(*x.shape[:-1], -1)

    return forward


def test_greedy_generation():
    """With a cache and without, alone and in a batch, and after padding: logits bit for bit, where
    the other layers allow it."""
    transformers = pytest.importorskip("transformers")
    import qkv.integrations.transformers as integration

    integration.register()
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=200, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=8, num_key_value_heads=2, attn_implementation="qkv",
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval()
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            module.forward = row_by_row(module)
    prompt = torch.randint(3, 200, (2, 37))

    def logits(ids, **options):
        found = model.generate(
            ids, attention_mask=ids.ne(0).long(), max_new_tokens=12, do_sample=False,
            pad_token_id=0, return_dict_in_generate=True, output_logits=True, **options,
        )  # fmt: skip
        return torch.stack(found.logits)

    expected = logits(prompt)
    assert torch.equal(logits(prompt, use_cache=False), expected)
    assert torch.equal(logits(prompt[1:]), expected[:, 1:])
    padded = torch.cat([torch.zeros(2, 27, dtype=torch.long), prompt], 1)
    assert torch.equal(logits(padded), expected)
    padded[1, :40], shorter = 0, prompt[1:, 13:]
    assert torch.equal(logits(padded[:, 27:])[:, 1:], logits(shorter))
    assert torch.equal(logits(padded, use_cache=False)[:, 1:], logits(shorter))


def third_derivative():
    x = inputs(4, 4, torch.float64, (1, 1))[0].requires_grad_()
    y = qkv.attention(x, x, x).square().sum()
    for _ in range(3):
        (y,) = torch.autograd.grad(y, x, create_graph=True)
        y = y.square().sum()


REFUSED = {
    "merge": lambda: qkv.merge([torch.zeros(1, 2, 3)] * 2, [torch.zeros(1, 2)] * 2),
    "third derivatives": third_derivative,
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_have_the_same_bits_says_so(name):
    with pytest.raises(NotImplementedError, match=MODE):
        REFUSED[name]()
    with qkv.reproducible(False):
        REFUSED[name]()


def test_the_setting():
    assert qkv.is_reproducible()
    with qkv.reproducible(False):
        assert not qkv.is_reproducible()
        with pytest.raises(KeyError), qkv.reproducible():
            raise KeyError
        assert not qkv.is_reproducible()
    assert qkv.is_reproducible()


@pytest.mark.parametrize(
    "value, said",
    [
        ("1", "True"), ("yes", ""),
        *(pytest.param(x, "False", marks=pytest.mark.long) for x in ("0", "")),
    ],
)  # fmt: skip
def test_the_environment(value, said):
    done = subprocess.run(
        [sys.executable, "-c", "import qkv; print(qkv.is_reproducible())"],
        capture_output=True, text=True, env=os.environ | {"QKV_REPRODUCIBLE": value},
    )  # fmt: skip
    assert done.stdout.strip() == said
    if not said:
        assert "QKV_REPRODUCIBLE is 'yes', expected 0 or 1" in done.stderr
