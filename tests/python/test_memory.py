"""Memory grows with the length of the sequences, not its square, and no keys are copied."""

import pytest
from common import run_python

MEASURE = """
import torch, qkv
from torch.nn.functional import scaled_dot_product_attention
attention = {attention}
torch.set_num_threads(4)

def peak():
    for line in open("/proc/self/status"):
        if line.startswith("VmHWM"):
            return int(line.split()[1]) / 1024

def growth(f):
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # the peak restarts from what is resident now
    before = peak()
    f()
    return peak() - before

def train(L, D=64, is_causal=False):
    x = [torch.randn(1, 1, L, D, requires_grad=True) for _ in range(3)]
    return growth(lambda: attention(*x, is_causal=is_causal).sum().backward())

train(64)  # libraries and thread stacks
"""


def megabytes(code, attention="torch.ops.qkv.attention"):
    return [float(x) for x in run_python(MEASURE.format(attention=attention) + code, 300).split()]


def test_no_more_than_torch():
    code = "print(train(4096, is_causal=True))"
    (ours,) = megabytes(code)
    (theirs,) = megabytes(code, "scaled_dot_product_attention")
    assert ours <= theirs + 32  # the scores alone would take 64


def test_very_long_head():
    """Against what torch cannot do without either, where torch itself takes minutes: the output
    and the three gradients."""
    (ours,) = megabytes("print(train(32768, is_causal=True))")
    assert ours <= 4 * 32768 * 64 * 4 / 2**20 + 64


def test_growth_is_linear():
    small, large = megabytes("print(train(4096), train(16384))")
    assert large <= 4 * small + 16


@pytest.mark.parametrize("layout", ["x", "x.mT.contiguous().mT", "x.repeat(1, 1, 1, 2)[..., ::2]"])
def test_keys_and_values_are_not_copied(layout):
    """A few queries on 64 MB each of keys and values, dense or strided."""
    code = f"""
x = torch.randn(1, 8, 16384, 128)
x = {layout}
q = torch.randn(1, 8, 4, 128)
with torch.no_grad():
    print(growth(lambda: attention(q, x, x)))
"""
    (ours,) = megabytes(code)
    assert ours < 16
