"""What the benchmark holds answers against."""

import pytest
import torch
from bench_runs import TENSORS, option_case
from common import attend, max_error

from qkv.bench import textbook
from qkv.bench.case import Case
from qkv.bench.check import check
from qkv.bench.options import OPTIONS, drawn
from qkv.bench.philox import kept, philox
from qkv.bench.suites import Entry

OTHERS = {"varlen", "varlen-each", "equal", "cache", "paged"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("spelling", ["2x4/2x33x70x8c", "3x2x5x9x4x6", "1x2x600x7x4c"])
def test_textbook_is_torchs_autograd(monkeypatch, spelling, dtype):
    """The f64 gradients that answers are held against are those of torch's autograd, computed in
    small blocks of queries and of batch items."""
    monkeypatch.setattr("qkv.bench.textbook.BLOCK_ELEMENTS", 2000)
    case = Case(Entry.parse(spelling), dtype)
    inputs = [case.inputs[x].detach().double().requires_grad_() for x in case.leaves]
    shape = case.entry.shape
    output, _ = attend(*inputs, is_causal=shape.is_causal, enable_gqa=shape.is_grouped)
    grads = torch.autograd.grad(output, inputs, case.grad_output.double())
    found = textbook.answers(case)
    for name, truth in zip(TENSORS, (output, *grads), strict=True):
        assert max_error(found[name], truth) < 1e-12
    assert all(e["error"] <= e["limit"] for e in check(case).values())


@pytest.mark.parametrize("option", sorted(set(OPTIONS) - OTHERS))
def test_textbook_with_options_is_torchs_autograd(monkeypatch, option):
    """The same with options, in blocks so small that with a window they see few of the keys."""
    monkeypatch.setattr("qkv.bench.textbook.BLOCK_ELEMENTS", 500)
    case = option_case(monkeypatch, option)
    inputs = {
        name: x.detach().double().requires_grad_(x.requires_grad)
        if isinstance(x, torch.Tensor) and x.is_floating_point()
        else x
        for name, x in case.inputs.items()
    }
    output, _ = attend(**inputs, dropout_seed=7)
    leaves = [inputs[name] for name in case.leaves]
    grads = torch.autograd.grad(output, leaves, case.grad_output.double())
    found = textbook.answers(case, seed=7)
    assert list(found) == ["output"] + [f"grad_{name}" for name in case.leaves]
    for x, truth in zip(found.values(), (output, *grads), strict=True):
        assert max_error(x, truth) < 1e-12


def test_textbook_takes_documents_one_by_one(monkeypatch):
    case = option_case(monkeypatch, "varlen", "5x4/2x21x21x8c", torch.float64)
    assert [end - begin for begin, end in case.documents] == drawn(case.entry.shape)
    found, (begin, end) = textbook.answers(case), case.documents[2]
    inputs = [x[begin:end].detach().transpose(0, 1).requires_grad_() for x in
              (case.inputs[name] for name in case.leaves)]  # fmt: skip
    output, _ = attend(*inputs, is_causal=True, enable_gqa=True)
    grads = torch.autograd.grad(output, inputs, case.grad_output[begin:end].transpose(0, 1))
    for x, truth in zip(found.values(), (output, *grads), strict=True):
        assert max_error(x[begin:end].transpose(0, 1), truth) < 1e-12


def test_philox_is_random123s():
    """Philox gives the known answers that its authors publish, and any range of a larger mask."""
    zeros, ones = (torch.tensor(x) for x in (0, 0xFFFFFFFF))
    answer = [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    assert [x.item() for x in philox([zeros] * 4, (0, 0))] == answer
    answer = [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]
    assert [x.item() for x in philox([ones] * 4, (0xFFFFFFFF, 0xFFFFFFFF))] == answer
    whole = kept(-3, 0.3, range(4), range(9), range(30))
    assert 0.6 < whole.double().mean() < 0.8
    assert whole[1:3, 4:9, 5:23].equal(kept(-3, 0.3, range(1, 3), range(4, 9), range(5, 23)))
