"""Choosing the instruction set: QKV_ISA, qkv.set_isa, and their errors."""

import os
import re
import subprocess
import sys

import pytest

import qkv


def run(isa):
    return subprocess.run(
        [sys.executable, "-c", "import qkv; print(qkv.active_isa())"],
        capture_output=True, text=True, env={**os.environ, "QKV_ISA": isa}, timeout=60,
    )  # fmt: skip


@pytest.mark.one_in(2)
@pytest.mark.parametrize("isa", qkv.supported_isas())
def test_forced(isa):
    assert run(isa).stdout.strip() == isa


def test_empty_means_best():
    assert run("").stdout.strip() == qkv.supported_isas()[0]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("isa", ["sse9", "AVX2", " avx2"])
def test_unknown(isa):
    done = run(isa)
    assert done.returncode != 0
    assert re.search(rf"ValueError: QKV_ISA.*'{isa}'.*generic", done.stderr)


def test_unknown_at_the_first_call():
    code = "import torch, qkv; x = torch.ones(1, 1, 2, 2); torch.ops.qkv.attention(x, x, x)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60,
        env={**os.environ, "QKV_ISA": "sse9"},
    )  # fmt: skip
    assert done.returncode == 1
    assert re.search(r"Error: QKV_ISA.*'sse9'.*generic", done.stderr)


def test_set_unknown():
    before = qkv.active_isa()
    with pytest.raises(ValueError, match="set_isa.*'sse9'.*generic"):
        qkv.set_isa("sse9")
    assert qkv.active_isa() == before


def test_set_unsupported():
    missing = [x for x in ("amx", "avx512bf16", "avx512", "avx2") if x not in qkv.supported_isas()]
    if not missing:
        pytest.skip("this CPU runs every instruction set there is")
    with pytest.raises(ValueError, match=f"this CPU cannot run '{missing[0]}'.*generic"):
        qkv.set_isa(missing[0])


def test_best_first():
    order = ["amx", "avx512bf16", "avx512", "avx2", "neon", "generic"]
    isas = qkv.supported_isas()
    if "amx" in isas:  # then vectors multiply bf16 at half the rate of f32
        order[1:3] = ["avx512", "avx512bf16"]
    assert isas == sorted(isas, key=order.index) and isas[-1] == "generic"
