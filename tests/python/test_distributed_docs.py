"""The examples of docs/distributed.md and of the docstrings, on several ranks."""

import doctest
import re
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from distributed_world import run

import qkv
import qkv.distributed

PAGE = Path(__file__).parents[2] / "docs" / "distributed.md"


def run_page(text):
    """The loss at each step, and the gradients of the last one, of the script; and whether the
    examples after it give what one process gives."""
    script, mesh = re.findall(r"^```py\n(.*?)^```", text, re.S | re.M)
    names = {}
    with mock.patch.object(dist, "init_process_group"):  # there is one
        exec(compile(script, PAGE, "exec"), names)
    exec(compile(mesh, PAGE, "exec"), names)
    whole = qkv.distributed.unshard(names["output"], -2, names["mesh"], seqlen=names["N"])
    same = torch.allclose(whole, qkv.attention(*names["whole"], is_causal=True), atol=1e-5)
    return names["losses"], [x.grad for x in names["model"].parameters()], same


def trained_alone(text):
    """The same of one process, without sharding."""
    script, _ = re.findall(r"^```py\n(.*?)^```", text, re.S | re.M)
    attend = "qkv.attention(query, key, value, is_causal=True)"
    script = script.replace("ring_attention(query, key, value, is_causal=True, seqlen=N)", attend)
    script = script.replace("DistributedDataParallel(Model())", "Model()")
    names = {"qkv": qkv}
    alone = {
        "init_process_group": mock.DEFAULT, "all_reduce": mock.DEFAULT,
        "get_world_size": lambda: 1,
    }  # fmt: skip
    with (
        mock.patch.multiple(dist, **alone),
        mock.patch.object(qkv.distributed, "shard", lambda x, dim, value=0: x),
    ):
        exec(compile(script, PAGE, "exec"), names)
    return names["losses"], [x.grad for x in names["model"].parameters()]


def test_the_page():
    text = PAGE.read_text()
    losses, gradients = trained_alone(text)
    assert losses[2] < losses[0]
    for found, found_gradients, same in run(2, run_page, text, timeout=600.0):
        assert same
        torch.testing.assert_close(found, losses, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(found_gradients, gradients, rtol=1e-3, atol=1e-6)


def example_of(name):
    """How many lines of the docstring's example there are, and how many do not give what it says:
    on rank 0, which its output is of."""
    function = getattr(qkv.distributed, name)
    names = {"torch": torch, "qkv": qkv, "dist": dist, "F": F}
    (example,) = doctest.DocTestFinder(recurse=False).find(function, globs=names, module=False)
    with mock.patch.object(dist, "init_process_group", return_value=None):
        result = doctest.DocTestRunner(verbose=False).run(example, out=lambda text: None)
    return len(example.examples), result.failed if dist.get_rank() == 0 else 0


@pytest.mark.parametrize("name", ["ring_attention", "shard", "unshard"])
def test_examples_in_docstrings(name):
    for lines, failed in run(2, example_of, name):
        assert lines and not failed
