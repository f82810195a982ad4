"""python -m qkv.env, and QKV_VERBOSE."""

import os
import subprocess
import sys
import warnings

import pytest
import torch

import qkv
from qkv import env


def run(code: str, **variables: str) -> str:
    command = (
        [sys.executable, *code.split()] if code.startswith("-m") else [sys.executable, "-c", code]
    )
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, env=os.environ | variables
    )
    return done.stdout + done.stderr


def test_says_what_a_report_needs():
    lines = run("-m qkv.env", OMP_PROC_BIND="true", QKV_ISA="generic").splitlines()
    said = dict(line.split(":", 1) for line in lines)
    said = {name: what.strip() for name, what in said.items()}
    assert said["qkv"].startswith(qkv.__version__) and "libqkv.so" in said["qkv"]
    assert said["torch"].startswith(torch.__version__)
    assert said["cpu"].startswith(env.cpu_model())
    assert said["instruction set"] == f"generic of {', '.join(qkv.supported_isas())}"
    assert said["threads"].endswith("bound: true")
    assert "libgomp" in said["OpenMP"]
    assert {"OMP_PROC_BIND=true", "QKV_ISA=generic"} <= {*said["variables"].split()}
    assert said["doors"] == "none open"


def test_doors():
    with qkv.replace_sdpa(), qkv.replace_flex():
        assert env.describe()["doors"].startswith("replace_sdpa, replace_flex")
    assert "replace" not in env.describe()["doors"]


LEFT = """
import warnings, torch, qkv
from torch.nn.functional import scaled_dot_product_attention as sdpa
x = torch.randn(1, 2, 4, 8)
warnings.simplefilter("always")
with qkv.replace_sdpa():
    for _ in range(2):
        sdpa(x.to("meta"), x.to("meta"), x.to("meta"))
        sdpa(x, x, x)
        layer = qkv.nn.MultiheadAttention(8, 2, device="meta")
        layer(*[torch.randn(1, 4, 8, device="meta")] * 3)
"""


@pytest.mark.parametrize("value", [pytest.param("0", marks=pytest.mark.long), "1"])
def test_verbose(value):
    """What is left to torch is said once, if it was asked for."""
    said = run(LEFT, QKV_VERBOSE=value)
    expected = int(value)
    assert said.count("qkv: scaled_dot_product_attention is left to torch: the tensors") == expected


def test_quiet_by_default():
    x = torch.randn(1, 2, 4, 8, device="meta")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with qkv.replace_sdpa():
            torch.nn.functional.scaled_dot_product_attention(x, x, x)
