"""docs/models.md, and what makes it: models are found wrong where qkv is, and right elsewhere."""

import json
import os
import re
import time

import pytest
import torch
from bench_runs import ROOT

transformers = pytest.importorskip("transformers")
pytest.importorskip("timm")
pytest.importorskip("diffusers")

import qkv.integrations.transformers  # noqa: E402
from benchmarks.models_tried import judge, page, pool  # noqa: E402
from qkv.nn import _attend  # noqa: E402

RESULTS = sorted((ROOT / "benchmarks" / "results").glob("models-*.json"))


def test_the_page_is_what_the_results_say():
    older, run = (json.loads(x.read_text()) for x in RESULTS)
    assert (ROOT / "docs" / "models.md").read_text() == page.page(run, older)


def test_nothing_is_wrong_with_either_version():
    """They are the first and the last that the package says it works with."""
    ends = [re.search(r"models-(\d+\.\d+)\.", x.name).group(1) for x in RESULTS]
    assert tuple(ends) == qkv.integrations.transformers.TRIED
    for file in RESULTS:
        found = json.loads(file.read_text())["families"].items()
        assert [name for name, x in found if x["outcome"] in ("wrong", "crashed")] == []


@pytest.mark.parametrize("name", ["llama", "bart", "vit"])
def test_a_family_that_is_right(name):
    found = pool.tried(name)
    assert (found["outcome"], found["why"]) == ("right", "")
    generates = {"greedy, dynamic cache", "greedy, static cache", "beams"}
    expected = set(judge.CHECKS) - (generates if name == "vit" else set())
    assert {check for check, said in found["checks"].items() if said == "ok"} == expected


@pytest.mark.parametrize("change, why", [
    ({"scale": 0.5}, "float32: logits is off by"),
    ({"attn_mask": None, "window_size": (-1, -1)}, "float32: logits is off by"),
])  # fmt: skip
def test_a_wrong_attention_is_found(monkeypatch, change, why):
    right = _attend.attention
    monkeypatch.setattr(
        _attend, "attention", lambda *args, **options: right(*args, **options | change)
    )
    found = pool.tried("llama")
    assert found["outcome"] == "wrong" and why in found["why"]


def test_a_wrong_gradient_is_found(monkeypatch):
    """Of one layer's keys, by a thousandth."""
    right = _attend.attention

    def wrong(query, key, *args, **options):
        key = key + 1e-3 * (key - key.detach())
        return right(query, key, *args, **options)

    monkeypatch.setattr(_attend, "attention", wrong)
    found = pool.tried("llama")
    assert found["outcome"] == "wrong" and "float32: gradient of" in found["why"]


def test_a_refusal_is_said(monkeypatch):
    def refuse(*args, **options):
        raise NotImplementedError("no such thing")

    monkeypatch.setattr(_attend, "attention", refuse)
    found = pool.tried("llama")
    assert (found["outcome"], found["why"]) == ("refused", "no such thing")


def test_what_stays_and_what_cannot_be_built():
    assert pool.tried("mamba")["outcome"] == "stays"
    assert pool.tried("sam_mask_decoder")["outcome"] == "not built"


def test_a_process_that_ends_or_hangs_ends_nothing_else(monkeypatch):
    def tried(name):
        if name == "hangs":
            time.sleep(60)
        if name == "crashes":
            os._exit(3)
        return {"outcome": "right", "why": ""}

    monkeypatch.setattr(pool, "tried", tried)
    before = torch.get_num_threads()
    found = dict(pool.run(["hangs", "crashes", "works"], jobs=2, timeout=3))
    torch.set_num_threads(before)
    assert {name: x["outcome"] for name, x in found.items()} == {
        "hangs": "not done", "crashes": "crashed", "works": "right",
    }  # fmt: skip


def test_what_was_right_has_to_stay_so():
    then = {"a": {"outcome": "right"}, "b": {"outcome": "right"}, "c": {"outcome": "wrong"}}
    now = {"a": {"outcome": "wrong"}, "b": {"outcome": "not done"}, "c": {"outcome": "wrong"}}
    assert page.worse(then, now) == ["a"]
