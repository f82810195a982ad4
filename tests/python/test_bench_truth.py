"""What the benchmark holds answers against: qkv.testing, in blocks, gives what it gives in one."""

import pytest
import torch
from bench_runs import TENSORS, option_case

from benchmarks import truth
from benchmarks.case import Case
from benchmarks.check import check
from benchmarks.grid import parse
from benchmarks.options import OPTIONS, drawn
from qkv.testing import attention, max_error

OTHERS = {"varlen", "varlen-each", "equal", "cache", "int8", "paged"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("spelling", ["2x4/2x33x70x8c", "3x2x5x9x4x6", "1x2x600x7x4c"])
def test_blocks_of_queries_and_of_items(monkeypatch, spelling, dtype):
    monkeypatch.setattr("benchmarks.truth.BLOCK_ELEMENTS", 2000)
    case = Case(parse(spelling), dtype)
    inputs = [case.inputs[x].detach().double().requires_grad_() for x in case.leaves]
    shape = case.entry.shape
    output = attention(*inputs, is_causal=shape.is_causal, enable_gqa=shape.is_grouped)
    grads = torch.autograd.grad(output, inputs, case.grad_output.double())
    found = truth.answers(case)
    for name, expected in zip(TENSORS, (output, *grads), strict=True):
        assert max_error(found[name], expected) < 1e-12
    assert all(e["error"] <= e["limit"] for e in check(case).values())


@pytest.mark.parametrize("option", sorted(set(OPTIONS) - OTHERS))
def test_blocks_with_options(monkeypatch, option):
    """The same with options, in blocks so small that with a window they see few of the keys."""
    monkeypatch.setattr("benchmarks.truth.BLOCK_ELEMENTS", 500)
    case = option_case(monkeypatch, option)
    inputs = {
        name: x.detach().double().requires_grad_(x.requires_grad)
        if isinstance(x, torch.Tensor) and x.is_floating_point()
        else x
        for name, x in case.inputs.items()
    }
    output = attention(**inputs, dropout_seed=7)
    leaves = [inputs[name] for name in case.leaves]
    grads = torch.autograd.grad(output, leaves, case.grad_output.double())
    found = truth.answers(case, seed=7)
    assert list(found) == ["output"] + [f"grad_{name}" for name in case.leaves]
    for x, expected in zip(found.values(), (output, *grads), strict=True):
        assert max_error(x, expected) < 1e-12


def test_documents_one_by_one(monkeypatch):
    case = option_case(monkeypatch, "varlen", "5x4/2x21x21x8c", torch.float64)
    assert [end - begin for begin, end in case.documents] == drawn(case.entry.shape)
    found, (begin, end) = truth.answers(case), case.documents[2]
    inputs = [x[begin:end].detach().transpose(0, 1).requires_grad_() for x in
              (case.inputs[name] for name in case.leaves)]  # fmt: skip
    output = attention(*inputs, is_causal=True, enable_gqa=True)
    grads = torch.autograd.grad(output, inputs, case.grad_output[begin:end].transpose(0, 1))
    for x, expected in zip(found.values(), (output, *grads), strict=True):
        assert max_error(x[begin:end].transpose(0, 1), expected) < 1e-12
