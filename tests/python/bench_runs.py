"""What the tests of python -m qkv.bench and python -m benchmarks share. No test looks at how long
anything took."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from benchmarks import compiled, options
from benchmarks.case import Case
from qkv.bench import machine, threads

ROOT = Path(__file__).resolve().parents[2]
TENSORS = ("output", "grad_query", "grad_key", "grad_value")


PNG = b"\x89PNG\r\n\x1a\n"


def run_bench(*arguments, **environment):
    """The suite of the grid."""
    return run_program("benchmarks", "--suite", "grid", *arguments, **environment)


def run_program(package, *arguments, **environment):
    command = [sys.executable, "-m", package, *map(str, arguments)]
    env = {k: v for k, v in os.environ.items() if k != "QKV_ISA"} | environment
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=env, cwd=ROOT)


def refused(capsys, main, *arguments):
    """What a program says of its arguments."""
    with pytest.raises(SystemExit) as exit:
        main([*map(str, arguments)])
    assert exit.value.code == 2
    return capsys.readouterr().err


def sdpa(query, key, value, **options):
    return F.scaled_dot_product_attention(query, key, value, **options)


def tables_of(text):
    """[(titles, rows)] of each table that is printed for a terminal; both lists of cells."""
    lines, found = [*text.splitlines(), ""], []
    for i, line in enumerate(lines):
        if not line.startswith("---"):
            continue
        columns = [slice(*dashes.span()) for dashes in re.finditer("-+", line)]
        first = max((j for j in range(i) if not lines[j]), default=-1) + 1
        rows = lines[i + 1 : lines.index("", i)]
        cells = [[x[at].strip() for at in columns] for x in (*lines[first:i], *rows)]
        titles = [" ".join(filter(None, x)) for x in zip(*cells[: i - first], strict=True)]
        found.append((titles, cells[i - first :]))
    return found


def markdown_rows(text):
    return [line for line in text.splitlines() if line.startswith("|")]


def make_up_rates(monkeypatch):
    """What this machine can do at best, without the seconds of all cores that measuring it takes,
    and threads of which nothing is to be said.
    It is measured in test_bench_measure.py, and by the commands that run as a process."""
    read = {"read_gbs": 12.5}
    peak = read | {"gflops": 80.0, "instruction": "FMA"}
    monkeypatch.setattr(machine, "rates", lambda dtype: dict(peak if dtype else read))
    monkeypatch.setattr(threads, "warning", lambda: None)


def leave_out_compiled(monkeypatch):
    monkeypatch.setattr(compiled, "compiler_fails", lambda: "left out of this test")


SMALL = "2x4/2x21x21x8"  # of every option; with windows of 4 keys


def option_case(monkeypatch, option, shape=SMALL, dtype=torch.float32):
    """Without the ways that torch.compile has, which take it many seconds each."""
    monkeypatch.setattr(options, "WINDOW", (3, 0))
    leave_out_compiled(monkeypatch)
    return Case(options.parse(f"{option}:{shape}"), dtype)
