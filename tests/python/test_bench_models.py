"""python -m benchmarks.models, of models that are small."""

import dataclasses
import json
import re

import pytest
import torch
import torchvision_operators  # noqa: F401
from bench_runs import make_up_rates, markdown_rows, refused, tables_of

pytest.importorskip("transformers")

from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS  # noqa: E402

from benchmarks.models import __main__ as models  # noqa: E402
from benchmarks.models import answers, steps  # noqa: E402
from benchmarks.models.parts import PARTS, shares  # noqa: E402
from benchmarks.program import DTYPES  # noqa: E402
from qkv.bench.measure import quartiles  # noqa: E402

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 50}
SMALL = {
    "BERT-base": {**SIZES, "intermediate_size": 32},
    "GPT-2": {"n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 50},
    "ViT-S": {**SIZES, "intermediate_size": 32, "image_size": 64},
    "Whisper-tiny": {
        "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2,
        "decoder_attention_heads": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32,
        "max_source_positions": 10, "vocab_size": 50, "pad_token_id": 0, "bos_token_id": 1,
        "eos_token_id": 2, "decoder_start_token_id": 1,
    },
    "Llama 6×384": {**SIZES, "intermediate_size": 32, "num_key_value_heads": 1},
    "T5-small": {"d_model": 32, "num_layers": 2, "d_ff": 32, "num_heads": 2, "vocab_size": 50},
}  # fmt: skip
DROPPING = {"BERT-base", "GPT-2", "T5-small"}


@pytest.fixture
def small(monkeypatch):
    for name, about in steps.MODELS.items():
        lengths = {"length": min(about.length, 9), "read": min(about.read, 12)}
        config = about.config | SMALL[name]
        changed = dataclasses.replace(about, batch=2, config=config, **lengths)
        monkeypatch.setitem(steps.MODELS, name, changed)
    monkeypatch.setattr(steps, "AUDIO_FRAMES", 20)
    make_up_rates(monkeypatch)


@pytest.mark.long  # twelve seconds
def test_every_step_is_timed_and_printed_again(small, capsys, tmp_path):
    path = tmp_path / "run.json"
    assert models.main(["--repeats", "2", "--json", str(path)]) == 0
    run, found = json.loads(path.read_text()), tables_of(capsys.readouterr().out)
    expected = []
    for name, about in steps.MODELS.items():
        expected += [(name, "training, dropout")] if name in DROPPING else []
        expected += [(name, "training"), (name, "forward")]
        expected += [(name, "token")] if "Classification" not in about.model_class else []
    for dtype, (titles, rows) in zip(DTYPES, found, strict=True):
        results = [result for result in run["results"] if result["dtype"] == dtype]
        assert [(r["model"], r["step"]) for r in results] == expected
        for row, result in zip(rows, results, strict=True):
            cells, time = dict(zip(titles, row, strict=True)), result["time"]
            pairs = zip(time["torch"]["samples_s"], time["qkv"]["samples_s"], strict=True)
            ratio = quartiles([theirs / ours for theirs, ours in pairs])
            assert time["ratio"] == ratio and len(time["qkv"]["samples_s"]) == 2
            assert cells["× torch (IQR)"].startswith(f"{ratio['median']:.2f}")
            assert cells["gain"] == ("< 1.1" if ratio["median"] < 1.1 else "")
            assert all(sum(x.values()) == pytest.approx(1) for x in result["parts"].values())
            assert all(x["attention"] > 0 < x["linear"] for x in result["parts"].values())
            assert 0 < result["check"]["error"] < (1e-4 if dtype == "float32" else 0.1)
    assert models.main(["--from", str(path), "--markdown"]) == 0
    assert len(markdown_rows(capsys.readouterr().out)) == len(run["results"]) + 2 * 2


def lose_gradient(attention):
    def changed(module, query, key, *args, **kwargs):
        return attention(module, query, key.detach(), *args, **kwargs)

    return changed


def scale(attention):
    def changed(*args, **kwargs):
        output, weights = attention(*args, **kwargs)
        return output * 1.001, weights

    return changed


@pytest.mark.parametrize(
    "wrong, name, dtype, message",
    [
        (scale, "ViT-S", "float32", "ViT-S training: .* is off by .* from float64, at most "),
        *[
            (lose_gradient, "Llama 6×384", dtype, ".*k_proj.weight in one of the models alone")
            for dtype in DTYPES
        ],
    ],
)
def test_another_model_is_not_timed(small, capsys, monkeypatch, wrong, name, dtype, message):
    register = models.qkv.integrations.transformers.register

    def registered():
        register()
        ours = wrong(ALL_ATTENTION_FUNCTIONS["qkv"])
        monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._local_mapping, "qkv", ours)

    monkeypatch.setattr(models.qkv.integrations.transformers, "register", registered)
    monkeypatch.setattr(models, "measure", lambda *_: pytest.fail("timed another model"))
    assert models.main(["--models", name, "--dtype", dtype]) == 1
    assert re.search(f"refused to time a wrong answer: {message}", capsys.readouterr().err)


def test_a_token_is_the_last_of_the_whole_text(small):
    """And leaves the cache as it was."""
    for about in steps.MODELS.values():
        model = about.make()
        inputs = about.inputs(model.config)
        if given := inputs.get("token"):
            step = steps.make_step("token", model, given, torch.float32)
            expected = model(**given).logits[:, -1:]
            for _ in range(2):
                torch.testing.assert_close(step().logits, expected, atol=1e-5, rtol=1e-5)


def test_parts_have_the_work_that_is_theirs(small):
    """Of a model whose layers do not ask for attention nothing is spent there, forward or
    backward."""
    about = steps.MODELS["Llama 6×384"]
    model = about.make()
    step = steps.make_step("training", model, about.inputs(model.config)["training"], torch.float32)
    found = shares(model, step)
    assert set(found) == set(PARTS) and all(share > 0 for share in found.values())
    for layer in model.model.layers:
        layer.self_attn.forward = lambda hidden_states, **_: (hidden_states, None)
    assert shares(model, step)["attention"] == 0
    assert "sdpa" not in ALL_ATTENTION_FUNCTIONS._local_mapping
    assert not model.lm_head._forward_hooks


def test_what_is_no_rounding_of_torchs_is_refused():
    truth = {"logits": torch.ones(3, dtype=torch.float64)}
    ours = {"logits": torch.ones(3)}
    assert answers.check("here", ours, ours, truth, torch.float32) == {"error": 0, "torch_error": 0}
    with pytest.raises(answers.WrongAnswer, match="here: torch's logits is off by 1.0e.00"):
        answers.check("here", ours, {"logits": 2 * torch.ones(3)}, truth, torch.float32)
    with pytest.raises(answers.WrongAnswer, match="here: lost in one of the models alone"):
        answers.check("here", ours | {"lost": torch.ones(1)}, ours, truth, torch.float32)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--models", "GPT-2,GPT-9"], "--models: expected some of BERT-base, GPT-2, .*, got GPT-9"),
        (["--json", "no/such/folder/x.json"], "--json: there is no folder no/such/folder"),
        (["--from", "none.json", "--models", "GPT-2"], "--from: measures nothing, expected no --m"),
    ],
)
def test_bad_arguments_are_named(capsys, arguments, message):
    assert message.split(".*")[0] in refused(capsys, models.main, *arguments)
