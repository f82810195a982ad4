"""python -m benchmarks.generation."""

import json

import pytest
from bench_runs import make_up_rates, markdown_rows, refused, tables_of

from benchmarks import generation
from gpt.model import TorchCache
from qkv.bench.measure import quartiles

SMALL = ["--layers", "2", "--heads", "2", "--head-dim", "8", "--length", "20"]


def test_both_write_the_same_and_are_timed(monkeypatch, capsys, tmp_path):
    make_up_rates(monkeypatch)
    path = tmp_path / "run.json"
    arguments = [*SMALL, "--prompts", "3", "9", "--repeats", "2", "--json", str(path)]
    assert generation.main(arguments) == 0
    stdout, run = capsys.readouterr().out, json.loads(path.read_text())
    [(titles, rows)] = tables_of(stdout)
    assert [r["prompt"] for r in run["results"]] == [3, 9]
    for row, result in zip(rows, run["results"], strict=True):
        cells, samples = dict(zip(titles, row, strict=True)), result["samples_s"]
        assert {name: len(x) for name, x in samples.items()} == {"qkv": 2, "torch": 2}
        for name, title in (("qkv", "tokens/s"), ("torch", "torch's")):
            rate = quartiles([20 / seconds for seconds in samples[name]])
            assert result["tokens_per_s"][name] == rate and cells[title] == f"{rate['median']:.0f}"
        pairs = zip(samples["torch"], samples["qkv"], strict=True)
        ratio = quartiles([t / q for t, q in pairs])["median"]
        assert cells["× torch (IQR)"].startswith(f"{ratio:.2f}")
    assert generation.main(["--from", str(path), "--markdown"]) == 0
    assert len(markdown_rows(capsys.readouterr().out)) == 2 + 2


@pytest.mark.long
def test_every_layer_has_a_say_in_the_tokens(capsys, monkeypatch):
    """Whatever goes wrong in a cache changes the tokens, and nothing is timed."""
    monkeypatch.setattr(generation, "measure", lambda *_: pytest.fail("timed another text"))
    attend, calls = TorchCache._append_and_attend, []

    def forgetful(cache, *tensors):
        calls.append(cache)
        output = attend(cache, *tensors)
        return output if cache is calls[0] else output * 0  # the second layer's alone

    monkeypatch.setattr(TorchCache, "_append_and_attend", forgetful)
    assert generation.main([*SMALL, "--prompts", "9"]) == 1
    assert "refused to time a wrong answer: after " in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--layers", "0"], "'0', expected a positive int"),
        (["--head-dim", "7"], "head_dim: expected an even number, got 7"),
        (["--json", "no/such/folder/x.json"], "--json: there is no folder no/such/folder"),
        (["--from", "none.json"], "--from: none.json cannot be read: No such file"),
        (["--from", "none.json", "--repeats", "1"], "--from: measures nothing, expected no --rep"),
    ],
)
def test_bad_arguments_are_named(capsys, arguments, message):
    assert message in refused(capsys, generation.main, *arguments)
