"""qkv.nn.CachedDecoder against torch's decoder, which sees the whole target at once."""

import pytest
import torch
from common import HALVES, INF, assert_example_runs
from torch import nn

import qkv
from qkv.nn import CachedDecoder

B, L, S, E, H = 2, 7, 5, 32, 4
HIDDEN = torch.tensor([[False] * S, [False] * 3 + [True] * (S - 3)])


def make(cls=nn.TransformerDecoderLayer, **options):
    torch.manual_seed(0)
    layer = cls(E, H, 48, **({"batch_first": True} | options))
    decoder = nn.TransformerDecoder(layer, 2, nn.LayerNorm(E)).eval()
    for parameter in decoder.parameters():
        nn.init.normal_(parameter, std=0.3)
    return decoder


def sample(decoder, dtype=torch.float32):
    found = torch.randn(B, L, E, dtype=dtype), torch.randn(B, S, E, dtype=dtype)
    return found if decoder.layers[0].self_attn.batch_first else [x.transpose(0, 1) for x in found]


def whole(decoder, tgt, memory, hidden=None):
    length = tgt.size(1 if tgt.size(0) == memory.size(0) else 0)
    mask = nn.Transformer.generate_square_subsequent_mask(length, dtype=tgt.dtype)
    return decoder(tgt, memory, tgt_mask=mask, memory_key_padding_mask=hidden)


def in_parts(steps, tgt, parts=(3, 1, 1, 2), dim=1):
    return torch.cat([steps(part) for part in tgt.split(parts, dim)], dim)


@pytest.mark.parametrize("convert", [False, True])
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("hidden", [None, HIDDEN, torch.zeros(B, S).masked_fill(HIDDEN, -INF)])
@torch.no_grad()
def test_parts_are_the_whole(batch_first, norm_first, convert, hidden):
    decoder = make(batch_first=batch_first, norm_first=norm_first, activation="gelu")
    tgt, memory = sample(decoder)
    mask = nn.Transformer.generate_square_subsequent_mask(L)
    expected = decoder(tgt, memory, tgt_mask=mask, memory_key_padding_mask=hidden)
    if convert:
        qkv.convert(decoder)
    steps = CachedDecoder(decoder, memory, L, memory_key_padding_mask=hidden)
    found = in_parts(steps, tgt, dim=1 if batch_first else 0)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    assert steps.lengths.tolist() == [L, L]


@pytest.mark.parametrize("dtype", HALVES)
@torch.no_grad()
def test_half(dtype):
    decoder = make()
    tgt, memory = sample(decoder)
    expected = whole(decoder, tgt, memory)
    steps = CachedDecoder(decoder.to(dtype), memory.to(dtype), L)
    assert {cache.keys.dtype for both in steps.caches for cache in both} == {dtype}
    found = in_parts(steps, tgt.to(dtype))
    torch.testing.assert_close(found.float(), expected, atol=0.15, rtol=0.05)


@torch.no_grad()
def test_in_double_nothing_is_rounded_to_float():
    decoder = make().double()
    tgt, memory = sample(decoder, torch.double)
    hidden = torch.randn(B, S, dtype=torch.double).masked_fill(HIDDEN, -INF)
    steps = CachedDecoder(decoder, memory, L, memory_key_padding_mask=hidden)
    expected = whole(decoder, tgt, memory, hidden)
    torch.testing.assert_close(in_parts(steps, tgt), expected, atol=1e-12, rtol=1e-12)


@torch.no_grad()
def test_int8_caches():
    decoder = make()
    tgt, memory = sample(decoder)
    steps = CachedDecoder(decoder, memory, L, dtype=torch.int8)
    found, expected = in_parts(steps, tgt), whole(decoder, tgt, memory)
    assert steps.caches[1][0].keys.dtype == steps.caches[0][1].keys.dtype == torch.int8
    torch.testing.assert_close(found, expected, atol=0.1, rtol=0.05)
    assert not torch.allclose(found, expected, atol=1e-5)


@torch.no_grad()
def test_a_single_layer():
    layer = make().layers[0]
    tgt, memory = torch.randn(B, L, E), torch.randn(B, S, E)
    found = in_parts(CachedDecoder(layer, memory, L), tgt)
    torch.testing.assert_close(found, whole(layer, tgt, memory), atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_a_memory_of_another_width_and_the_options_of_our_layers():
    decoder = make()
    for layer in decoder.layers:
        slopes = torch.rand(H)
        layer.self_attn = qkv.nn.MultiheadAttention(
            E, H, batch_first=True, window_size=(2, 0), softcap=3.0, scale=0.7, alibi_slopes=slopes
        )
        layer.multihead_attn = qkv.nn.MultiheadAttention(
            E, H, kdim=24, vdim=24, batch_first=True, sinks=torch.randn(H)
        )
    decoder.eval()
    tgt, memory = torch.randn(B, L, E), torch.randn(B, S, 24)
    found = in_parts(CachedDecoder(decoder, memory, L), tgt)
    torch.testing.assert_close(found, whole(decoder, tgt, memory), atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_the_decoder_stays_as_it_is_and_parameters_are_shared():
    decoder = make()
    tgt, memory = sample(decoder)
    before = [(name, type(x)) for name, x in decoder.named_modules()]
    steps = CachedDecoder(decoder, memory, L)
    assert before == [(name, type(x)) for name, x in decoder.named_modules()]
    decoder.layers[0].linear1.weight.mul_(2)
    decoder.layers[0].self_attn.in_proj_weight.mul_(2)
    expected = whole(decoder, tgt, memory)
    torch.testing.assert_close(in_parts(steps, tgt), expected, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_prompts_of_two_lengths_and_places_taken_back():
    decoder = make()
    tgt, memory = sample(decoder)
    steps = CachedDecoder(decoder, memory, 10)
    steps(tgt[:, :4])
    steps.lengths = torch.tensor([4, 2])  # the second row's prompt has two words
    step = torch.randn(B, 1, E)
    found = steps(step)
    for row, length in enumerate((4, 2)):
        one = torch.cat([tgt[row, :length], step[row]])[None]
        expected = whole(decoder, one, memory[[row]])[0, -1:]
        torch.testing.assert_close(found[row], expected, atol=1e-5, rtol=1e-5)
    steps.lengths = steps.lengths - 1
    torch.testing.assert_close(steps(step), found)


@pytest.mark.parametrize("dtype", [None, torch.int8])
@torch.no_grad()
def test_rows_are_selected(dtype):
    decoder = make()
    tgt, memory = sample(decoder)
    rows = torch.tensor([1, 1, 0])
    beams = CachedDecoder(decoder, memory, L, memory_key_padding_mask=HIDDEN, dtype=dtype)
    beams(tgt[:, :3])
    beams.select(rows)
    chosen = CachedDecoder(
        decoder, memory[rows], L, memory_key_padding_mask=HIDDEN[rows], dtype=dtype
    )
    chosen(tgt[rows, :3])
    step = torch.randn(3, 1, E)
    torch.testing.assert_close(beams(step), chosen(step), atol=1e-6, rtol=1e-5)
    with pytest.raises(RuntimeError, match=r"tgt is \[2, 1, 32\], but \[3, L, 32\] is expected"):
        beams(step[:2])


@torch.no_grad()
def test_no_room():
    decoder = make()
    tgt, memory = sample(decoder)
    with pytest.raises(RuntimeError, match="cache"):
        CachedDecoder(decoder, memory, L - 1)(tgt)


class WithWeights(nn.TransformerDecoderLayer):
    def _mha_block(self, x, mem, attn_mask, key_padding_mask, is_causal=False):
        return self.multihead_attn(x, mem, mem, need_weights=True)[0]


class WithAThird(nn.TransformerDecoderLayer):
    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.third = nn.MultiheadAttention(E, H)


def with_option(name, **options):
    layer = make().layers[0]
    setattr(layer, name, qkv.nn.MultiheadAttention(E, H, batch_first=True, **options).eval())
    return layer


MEMORY = torch.zeros(B, S, E)
BAD = {
    "decoder is a Linear": (nn.Linear(2, 2), {}),
    "decoder is in training mode, but eval": (make().train(), {}),
    "decoder's attention is another, but self_attn": (make(WithAThird), {}),
    "add_zero_attn is given": (with_option("self_attn", add_zero_attn=True), {}),
    "add_bias_kv is given": (with_option("multihead_attn", add_bias_kv=True), {}),
    "window_size is given, but multihead_attn without": (
        with_option("multihead_attn", window_size=(1, 1)),
        {},
    ),
    r"memory is \[2, 32\], but \[B, S, 32\]": (make(), {"memory": MEMORY[:, 0]}),
    r"memory is \[2, 5, 9\], but \[S, B, 32\]": (
        make(batch_first=False),
        {"memory": torch.zeros(B, S, 9)},
    ),
    r"memory_key_padding_mask is torch.int64, but bool \(True = hidden\) or a floating": (
        make(),
        {"memory_key_padding_mask": HIDDEN.long()},
    ),
    r"memory_key_padding_mask is \[5\], but \[2, 5\]": (
        make(),
        {"memory_key_padding_mask": HIDDEN[0]},
    ),
    "length is 0, but 1 or more": (make(), {"length": 0}),
}


@pytest.mark.parametrize("message", BAD)
def test_what_is_refused(message):
    decoder, call = BAD[message]
    with pytest.raises((RuntimeError, TypeError), match=f"CachedDecoder: {message}"):
        CachedDecoder(decoder, **({"memory": MEMORY, "length": 4} | call))


@torch.no_grad()
def test_what_a_layer_may_not_ask_for():
    steps = CachedDecoder(make(WithWeights), MEMORY, L)
    with pytest.raises(RuntimeError, match="need_weights is given"):
        steps(torch.zeros(B, 1, E))


def test_gradients_are_refused():
    steps = CachedDecoder(make(), MEMORY, L)
    with pytest.raises(RuntimeError, match="grad"):
        steps(torch.zeros(B, 1, E))


def test_the_example_runs():
    assert_example_runs(CachedDecoder)
