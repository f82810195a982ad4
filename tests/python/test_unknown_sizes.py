"""Sizes that torch.compile knows only when the program runs, such as those of x[mask]."""

import pytest
import torch
import torch.nn.functional as F
from common import needs_compiler
from torch._dynamo.decorators import mark_unbacked
from torch.testing import assert_close

import qkv
import qkv.nn

WEIGHT = torch.randn(2, 8, 16, generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def sizes_are_captured(nothing_compiled):
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        yield


def heads(rows, count=2):
    """[1, H, rows, D] of [rows, H * D]."""
    return rows.view(1, -1, count, rows.shape[1] // count).transpose(1, 2)


def same(rows, **options):
    return qkv.attention(*[heads(rows)] * 3, **options)


def documents(rows):
    """Three rows a document."""
    begins = torch.arange(0, rows.shape[0] + 3, dtype=torch.int32)
    bounds = (begins[begins % 3 == 0]).clamp(max=rows.shape[0])
    return qkv.varlen_attn(*[rows.view(-1, 2, 8)] * 3, bounds, None, rows.shape[0], rows.shape[0])


def rotated(rows):
    angles = torch.arange(rows.shape[0]).unsqueeze(1) * torch.tensor([1.0, 0.1])
    return torch.cat(qkv.rotate(heads(rows), heads(rows), angles.cos(), angles.sin()))


def merged(rows, all_rows):
    parts = [
        qkv.attention(heads(all_rows), heads(of), heads(of), return_lse=True)
        for of in (rows, all_rows)
    ]
    return qkv.merge(*zip(*parts, strict=True))[0]


def latent(queries, rows):
    given = heads(queries), heads(queries)[..., :4], rows[None, None], rows[None, None, :, :4]
    return qkv.latent_attention(*given, WEIGHT, WEIGHT)


CALLS = {
    "rows": lambda rows, _: qkv.attention(rows, rows, rows),
    "heads": lambda rows, _: qkv.attention(*[heads(rows).squeeze(0)] * 3),
    "options": lambda rows, _: same(rows, window_size=(2, 1), softcap=3.0, sinks=WEIGHT[:, 0, 0]),
    "slopes": lambda rows, _: same(rows, is_causal=True, alibi_slopes=WEIGHT[:, 0, 0]),
    "dropout": lambda rows, _: same(rows, dropout_p=0.5) * 0,
    "mask": lambda rows, _: same(rows, attn_mask=rows[:, 0] > rows[:, :1]),
    "gradient of a mask": lambda rows, _: same(rows, attn_mask=rows @ rows.mT),
    "function": lambda rows, _: qkv.flex_attention(
        *[heads(rows)] * 3, score_mod=lambda score, b, h, i, j: score + h * (i - j)
    ),
    "shared heads": lambda rows, _: qkv.attention(
        heads(rows, 4), heads(rows)[..., :4], heads(rows), enable_gqa=True
    ),
    "queries": lambda rows, every: qkv.attention(*map(heads, (rows, every, every))),
    "keys": lambda rows, every: qkv.attention(*map(heads, (every, rows, rows))),
    "batch": lambda rows, every: qkv.attention(
        rows.view(-1, 2, 2, 4), *[every.view(-1, 2, 2, 4)[:1]] * 2
    ),
    "documents": lambda rows, _: documents(rows),
    "weights": lambda rows, _: qkv.attention_weights(heads(rows), heads(rows), reduce="heads"),
    "hard": lambda rows, _: qkv.hard_attention(*[heads(rows)] * 3),
    "rotation": lambda rows, _: rotated(rows),
    "merge": merged,
    "latent": lambda rows, _: latent(rows, rows),
    "latents": lambda rows, every: latent(every[:2], rows / 4),
    "indices": lambda rows, every: qkv.attention(
        *map(heads, (rows, every, every)), indices=torch.tensor([[[1, 4]]])
    ),
    "vmap": lambda rows, _: torch.vmap(lambda x: qkv.attention(x, x, x))(rows.view(-1, 2, 2, 4)),
    "functional gradient": lambda rows, _: torch.func.grad(lambda x: same(x).sin().sum())(rows),
    "cache": lambda rows, every: qkv.attention_with_kvcache(
        *map(heads, (rows.detach(), every.detach(), every.detach())), causal=True
    ),
}


def check(function, backend):
    compiled = torch.compile(function, fullgraph=True, backend=backend)
    for kept in ([True] * 10, [True, False] * 5, [False] * 9 + [True], [False] * 10):
        given = [torch.randn(10, 16, requires_grad=True)]
        given.append(given[0].detach().clone().requires_grad_())
        output, expected = (
            f(x, torch.tensor(kept)) for f, x in zip((compiled, function), given, strict=True)
        )
        assert_close(output, expected, equal_nan=True)
        if expected.requires_grad:
            grads = [torch.autograd.grad(x.square().sum(), y) for x, y in zip(
                (output, expected), given, strict=True
            )]  # fmt: skip
            # Few rows may be projected by another library than in a program.
            assert_close(*grads, equal_nan=True, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("call", CALLS)
def test_of_what_a_mask_keeps(call):
    check(lambda x, kept: CALLS[call](x[kept], x), "aot_eager")


@needs_compiler
@pytest.mark.parametrize("call", ["options", "documents"])
def test_in_inductor(call):
    check(lambda x, kept: CALLS[call](x[kept], x), "inductor")


def test_every_size():
    def causal(query, key):
        return qkv.attention(query.mT.mT, key, key, is_causal=True)

    compiled = torch.compile(causal, fullgraph=True, backend="aot_eager")
    for n in (5, 1, 0, 2):
        query, key = torch.randn(n, n + 1, n, 8), torch.randn(n, n + 1, 2 * n, 8)
        if n == 5:
            for dim in range(3):
                mark_unbacked(query, dim)
                mark_unbacked(key, dim)
        assert_close(compiled(query, key), causal(query, key))


def test_any_number_of_spans():
    def attend(spans):
        return qkv.attention(x, x, x, spans=spans)

    x = torch.randn(1, 2, 5, 8)
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    for n in (3, 1, 7):
        spans = torch.tensor([[0, 2, 3, 5] * n], dtype=torch.int32)
        if n == 3:
            mark_unbacked(spans, 1)
        assert_close(compiled(spans), attend(spans))
    for columns in (0, 3):
        with pytest.raises(RuntimeError):
            compiled(torch.zeros(1, columns, dtype=torch.int32))


def test_layers_and_replaced_attention():
    layer = qkv.nn.MultiheadAttention(16, 2)
    check(lambda x, kept: layer(x[kept], x[kept], x[kept])[0], "aot_eager")
    with qkv.replace_sdpa() as replaced:
        check(
            lambda x, kept: F.scaled_dot_product_attention(*[heads(x[kept]).squeeze(0)] * 3),
            "aot_eager",
        )
    assert replaced


def test_sizes_that_do_not_fit_are_refused_when_they_are_known():
    def attend(x, kept):
        return qkv.attention(x, x[kept], x[kept], attn_mask=torch.zeros(10, 3))

    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    x = torch.randn(10, 16)
    assert_close(compiled(x, torch.arange(10) < 3), attend(x, torch.arange(10) < 3))
    with pytest.raises(RuntimeError, match="attn_mask has the shape"):
        compiled(x, torch.arange(10) < 4)
