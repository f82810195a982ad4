"""Choosing the instruction set: QKV_ISA, qkv.set_isa, and their errors."""

import re
from pathlib import Path

import pytest
from common import run_python
from forks import run_forked

import qkv

ACTIVE = "import qkv; print(qkv.active_isa())"


def run(isa, code=ACTIVE):
    return run_forked(code, env={"QKV_ISA": isa})


@pytest.mark.parametrize("isa", qkv.supported_isas())
def test_forced(isa):
    assert run(isa).strip() == isa


def test_forced_from_the_start():
    """Where the environment has it before torch is there."""
    assert run_python(ACTIVE, env={"QKV_ISA": "generic"}).strip() == "generic"


def test_empty_means_best():
    assert run("").strip() == qkv.supported_isas()[0]


FAILING = """
import torch, qkv
try:
    {call}
except Exception as error:
    print(type(error).__name__, error)
"""


@pytest.mark.parametrize("isa", ["sse9", "AVX2", " avx2"])
def test_unknown(isa):
    printed = run(isa, FAILING.format(call="qkv.active_isa()"))
    assert re.match(rf"ValueError QKV_ISA.*'{isa}'.*generic", printed)


def test_unknown_at_the_first_call():
    call = "x = torch.ones(1, 1, 2, 2); torch.ops.qkv.attention(x, x, x)"
    printed = run("sse9", FAILING.format(call=call))
    assert re.match(r"\w*Error QKV_ISA.*'sse9'.*generic", printed)


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
    cpu = Path("/proc/cpuinfo").read_text()
    # Intel's vectors multiply bf16 at half the rate of f32, but for Cooper Lake's, which nobody has
    # measured.
    if "GenuineIntel" in cpu and not re.search(r"^model\s*: 85$", cpu, re.MULTILINE):
        order[1:3] = ["avx512", "avx512bf16"]
    assert isas == sorted(isas, key=order.index) and isas[-1] == "generic"
