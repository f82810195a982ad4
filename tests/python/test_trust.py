"""docs/compare.md: the tests that its tables of issues name exist, and torch behaves as it says."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention as sdpa
from torch.profiler import ProfilerActivity, profile

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/compare.md"
NOT_IMPLEMENTED = "flash_attention_for_cpu.*not (been )?implemented"

on_the_torch_of_the_page = pytest.mark.skipif(
    not torch.__version__.startswith("2.13."), reason="the page is about torch 2.13"
)


def rows():
    """Yields (issue, torch, qkv, held by) for each row of the tables of issues."""
    text = PAGE.read_text().partition("\n## What people trip over")[2].partition("\n## ")[0]
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("|") and cells[0] != "issue" and not cells[0].startswith("---"):
            yield cells


def exists(name):
    file, *places = name.split("::")
    source = ROOT / "tests/python" / file
    if not source.exists():
        return False
    text, indent = source.read_text(), ""
    if len(places) == 2:
        match = re.search(rf"^class {places[0]}\b.*?(?=^\S|\Z)", text, re.S | re.M)
        text, indent = match[0] if match else "", "    "
    return re.search(rf"^{indent}def {places[-1]}\(", text, re.M) is not None


def test_each_row_names_tests_that_exist():
    assert len(list(rows())) > 10
    for row in rows():
        assert len(row) == 4, row[0]
        names = re.findall(r"`(test_[^`]*)`", row[3])
        assert names, row[0]
        assert [name for name in names if not exists(name)] == []


def test_a_test_that_is_gone_is_found_out():
    assert exists("test_trust.py::rows") and exists(
        "test_nonfinite.py::TestMaskedNeverLeaks::test_future"
    )
    assert not exists("test_trust.py::gone") and not exists("test_gone.py::test")
    assert not exists("test_nonfinite.py::TestAsTorchsMath::test_future")


def operators(f):
    """The names of the operators that f calls, without their namespace."""
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        f()
    return {event.key.removeprefix("aten::") for event in seen.key_averages()}


def leaves(*sizes):
    return [torch.randn(sizes, requires_grad=True) for _ in range(3)]


@on_the_torch_of_the_page
class TestTorch:
    """One test for each row that says what torch does, in the order of the page."""

    @pytest.mark.parametrize("training", [True, False])
    def test_a_masked_query_of_the_layer(self, training):
        layer, x = (
            nn.MultiheadAttention(8, 2, batch_first=True).train(training),
            torch.randn(2, 4, 8),
        )
        mask = torch.zeros(4, 4, dtype=torch.bool)
        mask[2] = True
        with torch.set_grad_enabled(training):
            output, _ = layer(x, x, x, attn_mask=mask)
            bare, _ = layer(x, x, x, attn_mask=mask, need_weights=False)
        assert output[:, 2].isnan().all() and output[:, :2].isfinite().all()
        assert bare[:, 2].isnan().any() != training
        if training:
            output[:, :2].sum().backward()
            assert layer.in_proj_weight.grad.isnan().any()

    def test_hidden_nan(self):
        hidden = torch.arange(8) == 1
        floating = torch.zeros(8, 8).masked_fill(hidden, -torch.inf)
        for mask in (~hidden.expand(8, 8), floating):
            q, k, v = leaves(1, 1, 8, 4)
            k.detach()[..., 1, :] = torch.nan
            output = sdpa(q, k, v, mask)
            output.sum().backward()
            assert all(x.isnan().any() for x in (output, q.grad, k.grad, v.grad))
        q, k, v = torch.randn(3, 1, 1, 600, 4)
        v[..., -1, :] = torch.nan
        assert sdpa(q, k, v, is_causal=True).isnan().any(-1).sum() == 88

    def test_alignment(self):
        key, value = torch.randn(2, 1, 1, 8, 4)
        assert torch.equal(sdpa(key[..., -1:, :], key, value, is_causal=True), value[..., :1, :])

    def test_dropout_in_evaluation(self):
        class Model(nn.Module):
            def forward(self, x):
                return sdpa(x, x, x, dropout_p=0.5)

        model, x = Model().eval(), torch.randn(1, 1, 8, 4)
        assert not torch.equal(model(x), model(x))

    def test_the_hint_alone(self):
        x = torch.randn(2, 4, 8)
        with pytest.raises(RuntimeError, match="Need attn_mask"):
            nn.MultiheadAttention(8, 2, batch_first=True)(x, x, x, is_causal=True)

    def test_what_leaves_the_fused_kernel(self):
        q, k, v = leaves(1, 2, 16, 8)
        bias = torch.zeros(16, 16, requires_grad=True)
        fused = "_scaled_dot_product_flash_attention_for_cpu"
        assert fused in operators(lambda: sdpa(q, k, v))
        for call in ({"dropout_p": 0.1}, {"attn_mask": bias}):
            assert fused not in operators(lambda call=call: sdpa(q, k, v, **call))
        for x in ((q, k, v[..., :4]), (q[0], k[0], v[0])):  # docs/compare.md says so, too
            assert fused not in operators(lambda x=x: sdpa(*x))

    def test_layers(self):
        x = torch.randn(2, 16, 8)
        layer = nn.MultiheadAttention(8, 2, batch_first=True)
        seen = operators(lambda: layer(x, x, x))
        assert "bmm" in seen and "scaled_dot_product_attention" not in seen
        layer.eval()
        encoder = nn.TransformerEncoderLayer(8, 2, batch_first=True).eval()
        for call in (lambda: layer(x, x, x, need_weights=False), lambda: encoder(x)):
            with torch.no_grad():
                seen = operators(call)
            assert {"_native_multi_head_attention", "bmm"} <= seen

    def test_vmap(self):
        with pytest.warns(UserWarning, match="batching rule for aten::_scaled_dot_product_flash"):
            torch.vmap(sdpa)(*torch.randn(3, 3, 1, 2, 8, 4))
        seen = operators(lambda: torch.vmap(sdpa)(*torch.randn(3, 3, 2, 8, 4)))
        assert "_scaled_dot_product_attention_math" in seen

    def test_second_derivatives(self):
        q, k, v = leaves(1, 2, 8, 4)
        (g,) = torch.autograd.grad(sdpa(q, k, v).sum(), q, create_graph=True)
        with pytest.raises(RuntimeError, match=NOT_IMPLEMENTED):
            g.sum().backward()

    def test_forward_mode(self):
        x = torch.randn(1, 2, 8, 4)
        with pytest.raises(NotImplementedError, match=NOT_IMPLEMENTED):
            torch.func.jvp(lambda x: sdpa(x, x, x), (x,), (x,))

    def test_flex_attention(self):
        from torch.nn.attention.flex_attention import flex_attention

        with pytest.raises(NotImplementedError, match="does not support backward on CPU"):
            flex_attention(*leaves(1, 2, 16, 16))

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
    def test_rows_with_nothing_to_attend_to(self, dtype):
        mask = torch.ones(6, 6, dtype=torch.bool)
        mask[-1] = False
        for m in (mask, torch.zeros(6, 6, dtype=dtype).masked_fill(~mask, -torch.inf)):
            x = [t.detach().to(dtype).requires_grad_() for t in leaves(1, 2, 6, 8)]
            output = sdpa(*x, m)
            output.sum().backward()
            assert (output[..., -1, :] == 0).all()
            assert all(t.grad.isfinite().all() for t in x)
