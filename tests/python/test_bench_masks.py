"""python -m benchmarks --suite masks: what is compared computes the same."""

import pytest
import torch

from benchmarks import compiled
from benchmarks.case import Case
from benchmarks.check import check
from benchmarks.masks import MASKS
from benchmarks.options import parse
from benchmarks.suites import SUITES

SMALL = "1x2x96x96x8"


@pytest.mark.one_in(3)
@pytest.mark.parametrize("mask", MASKS)
def test_spans_block_mask_and_boolean_mask_are_the_same(monkeypatch, mask):
    """With the eager FlexAttention, since the compiler takes seconds."""
    monkeypatch.setattr(compiled, "compile_afresh", lambda function: function)
    case = Case(parse(f"{mask}:{SMALL}"), torch.float32)
    assert set(case.ways) == {"SDPA, bool mask", "FlexAttention"}
    assert {"output", "grad_query", "grad_key", "grad_value"} <= set(check(case))
    i, j = torch.arange(96)[:, None], torch.arange(96)
    shown = MASKS[mask](None, None, i, j)
    assert case.entry.how.scores(case.entry.shape) == 2 * shown.sum()


def test_every_mask_is_promised_to_be_faster_than_flex_attention():
    entries = SUITES["masks"].entries
    assert len(entries) == 16 and {e.promised["forward"].at_least for e in entries} == {1}
