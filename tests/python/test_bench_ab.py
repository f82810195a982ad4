"""python -m benchmarks.ab: what it makes of made-up times, and both sides of its pipes on the
library that is there. Nothing is built here."""

import math
from pathlib import Path
from types import SimpleNamespace

import pytest
from bench_runs import refused, tables_of

import qkv
from benchmarks import processes
from benchmarks.ab import __main__ as ab
from benchmarks.ab import builds, report, turns

INSTALLED = Path(qkv.__file__).parents[1]
MACHINE = {"cpu": "Abacus", "cores": 2, "threads": 1, "dtype": "float32", "qkv": "0.1.0",
           "isa": "avx2", "torch": "2.13.0", "torch_isa": "AVX2"}  # fmt: skip


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([], "the following arguments are required: --against"),
        (["--against", "no-such-commit"], "--against: git knows no commit 'no-such-commit'"),
        (["--against", "--version"], "--against: expected one argument"),
        (["--against", "x", "--shapes", "bort"], "--shapes: 'bort' is not BxHq"),
        (["--against", "x", "--dtype", "float64"], "--dtype float64: int8:1x32/8x1x4096x128 has"),
        (["--against", "x", "--isa", "sse9"], "--isa: invalid choice: 'sse9'"),
        (["--against", "x", "--rounds", "5"], "--rounds: '5', expected at least 6"),
        (["--against", "x", "--seconds", "0"], "--seconds: '0', expected a positive float"),
    ],
)
def test_bad_arguments_are_named(monkeypatch, capsys, arguments, message):
    if "x" in arguments:
        monkeypatch.setattr(builds, "short_hash", lambda commit: commit)
    assert message in refused(capsys, ab.main, *arguments)


@pytest.mark.parametrize("number", (report.FEWEST_ROUNDS, 9, 12, 39, 40))
def test_an_interval_holds_the_median_in_95_of_100_cases(number):
    """The chance that so many of the samples lie on one side, by counting; one rank further in
    there would be too many."""
    low, median, high = report.interval([*range(number)][::-1])
    assert median == (number - 1) / 2 and high == number - 1 - low

    def missed(rank):
        return 2 * sum(math.comb(number, k) for k in range(rank + 1)) / 2**number

    assert missed(low) <= 0.05 < missed(low + 1)


def made_up(now):
    """Rounds of two calls: one takes `now` times as long as then, the other as long, but for noise
    that is of neither build."""
    rounds = [{"then": 1e-3 * noise, "now": 1e-3 * noise * now} for noise in (1, 1.5, 1, 3, 1, 1)]
    return {
        ("1x2x8x8x4", "forward"): rounds,
        ("1x2x8x8x4", "backward"): [{"then": 1, "now": 1}] * 6,
    }


@pytest.mark.parametrize("now, mark", [(1.05, "slower"), (1.01, ""), (0.9, "faster")])
def test_the_table_has_ratios_and_marks_those_that_are_sure(now, mark):
    commits = {"then": "abc", "now": "def-dirty"}
    text = report.text(commits, MACHINE, made_up(now), 6)
    assert "then abc, now def-dirty; medians of 6 rounds" in text
    (titles, rows), = tables_of(text + "\n")  # fmt: skip
    assert titles[:6] == ["call", "pass", "then ms", "now ms", "now / then", "95 % interval"]
    one = f"{now:.3f}"
    assert rows[0][:3] == ["1x2x8x8x4", "forward", "1"]
    marks = [[mark], [""]] if mark else [[], []]
    assert rows[0][4:] == [one, f"{one} to {one}", *marks[0]]
    assert rows[1][4:] == ["1.000", "1.000 to 1.000", *marks[1]]
    assert rows[2][0] == "geometric mean" and rows[2][4] == f"{math.sqrt(now):.3f}"
    assert max(map(len, text.splitlines())) <= 100


@pytest.mark.long
def test_two_processes_take_turns(monkeypatch):
    """Each call is prepared and checked on both sides before it is timed."""
    asked, send = [], processes.Process.send

    def sent(self, *request):
        asked.append((request[0], self.name))
        send(self, *request)

    monkeypatch.setattr(processes.Process, "send", sent)
    entries = [ab.parse("1x2x8x8x4c"), ab.parse("cache:1x2x1x8x4")]
    packages = {"then": INSTALLED, "now": INSTALLED}
    args = SimpleNamespace(rounds=1, dtype="float32", threads=1, seconds=1e-3)
    machine, found = turns.run(packages, entries, args, {"QKV_ISA": "generic"})
    assert machine["isa"] == "generic" and machine["threads"] == 1
    calls = [("1x2x8x8x4c", "forward"), ("1x2x8x8x4c", "backward"), ("cache:1x2x1x8x4", "forward")]
    assert [*found] == calls
    assert all(min(round["then"], round["now"]) > 0 for (round,) in found.values())
    first, second = turns.TURNS
    both = ("then", "now")
    expected = [("describe", both)]
    for passes in (2, 1):
        expected += [("prepare", both), ("check", both), ("time", first * passes)]
    assert asked == [(what, name) for what, names in expected for name in names]
    assert first == (*both, *both[::-1]) and second == (*both[::-1], *both)


def test_what_a_build_cannot_do_is_named():
    """Both an error and the end of its process name the build."""
    with turns.processes({"then": INSTALLED}, {}) as one:
        process = one["then"]
        with pytest.raises(processes.Failed, match="then: prepare flash:1x2 float32: ValueError"):
            process.ask("prepare", "flash:1x2", "float32")
        process._process.kill()
        with pytest.raises(processes.Failed, match="then: its process ended with status -9"):
            process.reply()


# The package that is there, but that its attention is off.
WRONG = """
from pathlib import Path

real = Path({folder!r})
__path__ = [str(real)]
exec((real / "__init__.py").read_text())
right = attention
attention = lambda **inputs: right(**inputs) * 1.01
"""


@pytest.mark.long  # four seconds
def test_a_wrong_answer_is_not_timed(monkeypatch, capsys, tmp_path):
    wrong = tmp_path / "qkv" / "__init__.py"
    wrong.parent.mkdir()
    wrong.write_text(WRONG.format(folder=str(INSTALLED / "qkv")))
    monkeypatch.setattr(builds, "short_hash", lambda commit: commit)
    monkeypatch.setattr(builds, "build_then", lambda commit: tmp_path)
    monkeypatch.setattr(builds, "build_now", lambda: INSTALLED)
    assert ab.main(["--against", "HEAD", "--shapes", "1x2x8x8x4", "--threads", "1"]) == 1
    stdout, stderr = capsys.readouterr()
    assert (
        not stdout
        and "then: refused to time a wrong answer: 1x2x8x8x4 (1x2x8x8x4): output is off by"
        in stderr
    )
