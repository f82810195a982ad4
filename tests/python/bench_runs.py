"""What the tests of python -m qkv.bench share. No test looks at how long anything took."""

import os
import subprocess
import sys

import torch
import torch.nn.functional as F

from qkv.bench import options
from qkv.bench.case import Case
from qkv.bench.suites import Entry

TENSORS = ("output", "grad_query", "grad_key", "grad_value")


PNG = b"\x89PNG\r\n\x1a\n"


def run_bench(*arguments, **environment):
    command = [sys.executable, "-m", "qkv.bench", *map(str, arguments)]
    env = {k: v for k, v in os.environ.items() if k != "QKV_ISA"} | environment
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=env)


def sdpa(query, key, value, **options):
    return F.scaled_dot_product_attention(query, key, value, **options)


def rows_of(text):
    """The rows below the titles, up to the empty line, and where each title ends."""
    lines = text.splitlines()
    dashes = next(i for i, line in enumerate(lines) if line.startswith("---"))
    return lines[dashes - 1], lines[dashes + 1 : lines.index("", dashes)]


SMALL = "2x4/2x21x21x8"  # of every option; with windows of 4 keys


def option_case(monkeypatch, option, shape=SMALL, dtype=torch.float32):
    monkeypatch.setattr(options, "WINDOW", (3, 0))
    return Case(Entry.parse(f"{option}:{shape}"), dtype)
