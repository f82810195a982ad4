"""tests/gate: what runs after what, and what the screen at the end says."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    import tomli as tomllib

GATE = Path(__file__).resolve().parents[1] / "gate"


@pytest.fixture
def gate(monkeypatch, tmp_path):
    """The module tasks, whose logs are in a folder of their own."""
    monkeypatch.syspath_prepend(str(GATE))
    for name in ("tasks", "closing", "slices", "suites"):
        sys.modules.pop(name, None)
    import tasks

    monkeypatch.setattr(tasks, "LOGS", tmp_path)
    return tasks


def ended(gate, *tasks):
    """{name: how it ended}, in a process of its own, since tasks.run waits for any child."""
    said = []
    outcomes = gate.run(list(tasks), said.append)
    return {x.task.name: x.ended for x in outcomes}, said, outcomes


def test_tasks_wait_for_those_before_them(gate, tmp_path):
    order = tmp_path / "order"
    tasks = [gate.Task(n, f"echo {n} >>{order}", after) for n, after in [("b", ("a",)), ("a", ())]]
    found, said, _ = ended(gate, *tasks)
    assert found == {"a": "passed", "b": "passed"}
    assert order.read_text().split() == ["a", "b"]
    assert said[0] == "--> a"


def test_what_waits_for_a_failure_is_not_run(gate):
    bad = gate.Task("bad", "echo because; exit 3")
    found, said, _ = ended(
        gate, bad, gate.Task("next", "true", ("bad",)), gate.Task("other", "true")
    )
    assert found == {"bad": "FAILED", "next": "not run", "other": "passed"}
    assert "because" in said


def test_nothing_begins_after_a_broken_build(gate):
    build = gate.Task("build", "exit 1", is_build=True)
    found, _, _ = ended(gate, build, gate.Task("a", "sleep 60"), gate.Task("b", "true"))
    assert found["build"] == "FAILED" and "passed" not in found.values()


def test_the_screen_counts_and_explains(gate):
    import closing

    log = (
        "[  PASSED  ] 7 tests.\n[  FAILED  ] 1 test, listed below:\n[  FAILED  ] Suite.Name\n"
        "file.cpp:3: Skipped: no such CPU\n"
        "SKIPPED [2] tests/python/test_x.py:9: no g++\n"
        "=========== 5 passed, 2 skipped in 1.00s ===========\n"
        "avx2: 40 held, 3 failed, 0 refused of 43 calls\n"
        "  varlen_attn failed, after 7 calls: grad bias: off\n"
    )
    suite = gate.Task("suite", f"cat <<'END'\n{log}END\nexit 1")
    absent = gate.Task("absent", "true", skip="no qemu")
    _, _, outcomes = ended(gate, suite, absent)
    lines = closing.screen(outcomes, 61).splitlines()
    assert lines[-2:] == ["1 min 1 s", "52 passed, 4 failed, 4 skipped"]
    assert "  2 x no g++" in lines and "  1 x absent: no qemu" in lines
    assert "  suite: [  FAILED  ] Suite.Name" in lines
    assert "  suite: varlen_attn failed, after 7 calls: grad bias: off" in lines


def test_the_screen_ends_a_log_that_names_no_test(gate):
    import closing

    _, _, outcomes = ended(gate, gate.Task("package", "seq 20; echo 'cp: cannot stat it'; exit 1"))
    lines = closing.screen(outcomes, 1).splitlines()
    assert "  package: cp: cannot stat it" in lines and "  package: 14" in lines
    assert "  package: 13" not in lines and lines[-1] == "0 passed, 1 failed, 0 skipped"


def test_the_screen_names_an_error_in_pytest(gate):
    import closing

    log = (
        "INTERNALERROR> E           AssertionError: Traceback (most recent call last):\n"
        "INTERNALERROR> E             AssertionError: another profile\n"
        "INTERNALERROR> .venv/xdist/dsession.py:232: AssertionError\n"
        "INTERNALERROR> KeyError: <WorkerController gw1>\n"
    ) + "later\n" * 9
    _, _, outcomes = ended(gate, gate.Task("python", f"cat <<'END'\n{log}END\nexit 1"))
    named = [x for x in closing.screen(outcomes, 1).splitlines() if "INTERNALERROR" in x]
    assert [x.split("> ")[1].strip() for x in named] == [
        "E             AssertionError: another profile",
        "KeyError: <WorkerController gw1>",
    ]


@pytest.mark.long
def test_properties_are_drawn_alike_where_ci_is_set():
    """This file imports torch's tests, whose own profile of hypothesis conftest.py refuses."""
    file = str(Path(__file__).with_name("test_nn_in_torch.py"))
    collected = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "-q", "-pno:cacheprovider", file],
        env=os.environ | {"CI": "true"}, capture_output=True, text=True,
    )  # fmt: skip
    assert collected.returncode == 0, collected.stdout


def test_a_commit_draws_one_of_twelve_slices(gate, capsys):
    import slices

    drawn = set()
    for n in range(12):
        truth, sanitized, part, fuzz, models = slices.commit(f"{n:08x}")
        assert f"--seed {n}" in truth.command and part.after == (truth.name, sanitized.name)
        assert "--seed 0 " in fuzz.command
        drawn.add(part.command)
    assert len(drawn) == 12
    assert "once more: python tests/gate commit 0000000b" in capsys.readouterr().out


@pytest.mark.skipif(not (GATE.parents[1] / "csrc").exists(), reason="no sources here")
def test_each_defect_can_be_put_back():
    """A change of the line that a mutant changes has to change the mutant as well."""
    for mutant in tomllib.loads((GATE.parent / "mutants" / "defects.toml").read_text())["mutant"]:
        source = (GATE.parents[1] / mutant["file"]).read_text()
        assert source.count(mutant["old"]) == 1, mutant["name"]
