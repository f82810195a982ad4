"""python -m benchmarks.peers, with torch's SDPA and libraries that there are not."""

import json
import sys
from pathlib import Path

import pytest
from bench_runs import make_up_rates, markdown_rows, refused, tables_of

from benchmarks.peers import __main__ as peers
from benchmarks.program import DTYPES
from qkv.bench.measure import quartiles

ARGUMENTS = ["--shapes", "1x2x6x6x8,2x2x3x5x4", "--repeats", "2"]


@pytest.fixture
def fakes(monkeypatch):
    """Their processes are this Python's, and a turn takes two milliseconds."""
    make_up_rates(monkeypatch)
    monkeypatch.setattr(peers, "ROUNDS", 1000)
    monkeypatch.setattr(peers, "OWN", {n: peers.OWN[n] for n in ("qkv", "SDPA")})
    names = ("half", "picky", "missing")
    monkeypatch.setattr(peers, "PEERS", {name: f"fake_peers:{name}" for name in names})
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=":")
    return ["--environment", str(Path(sys.executable).parents[1])]


@pytest.mark.long  # five seconds, as the next
def test_who_is_right_is_timed_and_who_is_not_is_named(fakes, capsys, tmp_path):
    path = tmp_path / "run.json"
    assert peers.main([*fakes, *ARGUMENTS, "--json", str(path)]) == 0
    printed, run = capsys.readouterr().out, json.loads(path.read_text())
    cases = [(d, s) for d in DTYPES for s in ("1x2x6x6x8", "2x2x3x5x4")]
    assert [(r["dtype"], r["shape"]) for r in run["results"]] == cases
    for result in run["results"]:
        time, is_picky = dict(result["forward"]), result["dtype"] == "bfloat16"
        skipped = time.pop("skipped")
        assert [*time] == ["qkv", "SDPA", *([] if is_picky else ["picky"])]
        assert skipped["missing"] == "No module named 'no_such_library'"
        assert skipped["half"].startswith("wrong by ")
        assert skipped.get("picky") == (
            "NotImplementedError: bfloat16, on a Tuesday" if is_picky else None
        )
        for taken in time.values():
            pairs = zip(taken["samples_s"], time["qkv"]["samples_s"], strict=True)
            assert taken["ratio"] == quartiles([theirs / ours for theirs, ours in pairs])
            assert len(taken["samples_s"]) == 2 and taken["error"] < 0.1
    (titles, rows), (half_titles, half_rows) = tables_of(printed)
    assert titles[3:] == ["× SDPA (IQR)", "× picky (IQR)"] and half_titles[3:] == titles[3:4]
    assert len(rows) == len(half_rows) == 2
    ratio = run["results"][0]["forward"]["picky"]["ratio"]["median"]
    assert rows[0][4].startswith(f"{ratio:.2f}")
    assert "In float32, qkv 0.1.0; torch 2." in printed and "; picky 2.0:" in printed
    assert "note: missing took no part in 1x2x6x6x8 float32 forward, 2x2x3x5x4 float" in printed
    assert peers.main(["--from", str(path), "--markdown"]) == 0
    assert len(markdown_rows(capsys.readouterr().out)) == 2 * (2 + 2)


@pytest.mark.long
def test_a_wrong_answer_of_ours_ends_the_run(fakes, capsys, monkeypatch):
    monkeypatch.setattr(peers, "OWN", {"qkv": "fake_peers:half"})
    monkeypatch.setattr(peers, "PEERS", {})
    monkeypatch.setattr(peers, "rounds", lambda *_: pytest.fail("timed a wrong answer"))
    assert peers.main([*fakes, *ARGUMENTS]) == 1
    assert "refused to time a wrong answer: 1x2x6x6x8: qkv: wrong by" in capsys.readouterr().err


def test_every_round_has_every_way_and_every_other_goes_backwards():
    asked = []

    class Way:
        def __init__(self, name):
            self.name = name

        def ask(self, *request):
            asked.append(self.name)
            return float(len(asked))

    class Args:
        repeats, seconds = 3, 1.0

    found = peers.rounds({name: Way(name) for name in "abc"}, Args)
    assert "".join(asked) == "abccbaabc"
    assert found == {"a": [1, 6, 7], "b": [2, 5, 8], "c": [3, 4, 9]}


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([], "--environment: there is no no/such/bin/python; `make build/peers/ready` makes it"),
        (["--shapes", "bort"], "--shapes: 'bort' is not BxHq"),
        (["--shapes", "1x2x3x4x5c"], "--shapes: 1x2x3x4x5c is causal, expected as many keys"),
        (["--from", "run.json"], "--from: measures nothing, expected no --environment beside it"),
    ],
)
def test_bad_arguments_are_named(capsys, arguments, message):
    assert message in refused(capsys, peers.main, "--environment", "no/such", *arguments)
