"""python -m qkv.bench and python -m benchmarks name bad arguments before they run."""

import json
import os
import sys

import pytest
from bench_runs import refused

from benchmarks import __main__ as benchmarks
from benchmarks.confined import confine
from qkv.bench import __main__ as bench

GRID = ["--suite", "grid"]
pytestmark = pytest.mark.usefixtures("no_isa_asked_for")


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--shapes", "bort"], "--shapes: 'bort' is not BxHq"),
        (["--shapes", "tiny,"], "--shapes: '' is not BxHq"),
        (["--shapes", "1x2x8x8"], "--shapes: '1x2x8x8' is not BxHq"),
        (["--shapes", "1x3/2x8x8x4"], "2 key/value heads do not divide 3 query heads"),
        (["--shapes", "1x2x0x8x4"], "'1x2x0x8x4': every size must be at least 1"),
        (["--shapes", "bias:1x2x8x8x4"], "--shapes: 'bias:1x2x8x8x4' is not BxHq"),
        (["--dtype", "int8"], "--dtype: invalid choice: 'int8' (choose from 'float32', "),
        (["--threads", "0"], "'0', expected a positive int"),
        (["--threads", "two"], "'two', expected a positive int"),
        (["--threads", "9999999999"], "'9999999999', expected a positive int"),
        (["--seconds", "nan"], "'nan', expected a positive float"),
        (["--seconds", "inf"], "'inf', expected a positive float"),
        (["--repeats", "-1"], "'-1', expected a positive int"),
        (["--repeats", "3", "--seconds", "1"], "not allowed with"),
    ],
)
def test_bad_arguments_are_named(capsys, arguments, message):
    assert message in refused(capsys, bench.main, *arguments)
    assert message in refused(capsys, benchmarks.main, *GRID, *arguments)


def test_an_isa_that_the_cpu_has_not_is_named(capsys):
    message = refused(capsys, benchmarks.main, *GRID, "--isa", "sse9")
    assert "--isa: this CPU cannot run 'sse9', expected one of: " in message


def test_a_file_that_cannot_be_written_is_named(capsys):
    message = refused(capsys, benchmarks.main, *GRID, "--json", "no/such/folder/run.json")
    assert "--json: there is no folder no/such/folder" in message


def test_isa_confines_torch_as_well(monkeypatch):
    """A process whose environment says something else starts once more, and one that is right goes
    on."""
    started = []
    monkeypatch.setattr(os, "execve", lambda *command: started.append(command))
    confine(None, "generic", ["--shapes", "tiny"])
    ((program, command, environment),) = started
    assert program == sys.executable and command[1:] == ["-m", "benchmarks", "--shapes", "tiny"]
    assert environment["ATEN_CPU_CAPABILITY"] == "default"
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    confine(None, "generic", ["--shapes", "tiny"])
    assert len(started) == 1


@pytest.mark.parametrize(
    "suite, shapes, message",
    [
        ("options", "flash:1x2x8x8x4", "'flash' is no option; expected one of plain, "),
        ("options", "window:1x2x8x9x4", "window needs as many keys as queries"),
        ("options", "cache:1x2x1x8x4", "'cache:1x2x1x8x4': cache is for --suite decode"),
        ("decode", "bias:1x2x1x8x4", "bias is for another suite"),
        ("decode", "1x2x1x8x4c", "sees all keys, expected no 'c'"),
        ("derivatives", "varlen:2x2x8x8x4", "of qkv.attention alone"),
        ("derivatives", "cache:1x2x1x8x4", "cache is for --suite decode"),
        ("nothing", "plain", "invalid choice: 'nothing'"),
    ],
)
def test_shapes_of_another_suite_are_named(capsys, suite, shapes, message):
    assert message in refused(capsys, benchmarks.main, "--suite", suite, "--shapes", shapes)


def test_a_suite_is_asked_for(capsys):
    message = refused(capsys, benchmarks.main)
    assert "--suite: expected one of grid, options, masks, derivatives, decode" in message


@pytest.mark.parametrize(
    "path, message",
    [
        ("run.txt", "--plot: 'run.txt' ends in none of .png, .svg, .pdf"),
        ("no/such/run.png", "--plot: there is no folder no/such"),
    ],
)
def test_a_picture_that_cannot_be_drawn_is_named(capsys, path, message):
    assert message in refused(capsys, benchmarks.main, "--suite", "grid", "--plot", path)


@pytest.mark.parametrize(
    "module, arguments",
    [("matplotlib", ["--plot", "x.png"]), ("tabulate", GRID), ("tqdm", GRID)],
)
def test_a_missing_module_is_named_before_the_run(monkeypatch, capsys, module, arguments):
    monkeypatch.setitem(sys.modules, module, None)
    assert f"{module} is missing: pip install {module}" in refused(
        capsys, benchmarks.main, *arguments
    )


@pytest.mark.parametrize(
    "content, message",
    [
        (None, "cannot be read: No such file"),
        ("milliseconds", "is no JSON, expected a file that --json has written"),
        ("[1]", "is no run, expected a file that --json has written"),
        ('{"suite": "grid"}', "is no run, expected a file that --json has written"),
    ],
)
@pytest.mark.parametrize("option", ["--compare", "--from"])
def test_files_that_are_no_run_are_named(tmp_path, capsys, option, content, message):
    path = tmp_path / "old.json"
    if content:
        path.write_text(content)
    suite = GRID if option == "--compare" else []
    said = refused(capsys, benchmarks.main, *suite, option, path)
    assert f"{option}: {path} {message}" in said


def test_a_run_of_another_suite_is_named(tmp_path, capsys):
    path = tmp_path / "old.json"
    fields = ("machine", "peak", "directions", "results", "geometric_mean", "warnings")
    path.write_text(json.dumps({"suite": "decode"} | dict.fromkeys(fields)))
    message = refused(capsys, benchmarks.main, *GRID, "--compare", path)
    assert f"--compare: {path} is a run of 'decode', expected one of grid" in message


def test_printing_a_run_measures_nothing(capsys):
    arguments = ("--from", "run.json", "--shapes", "tiny", "--repeats", "1")
    message = refused(capsys, benchmarks.main, *arguments)
    assert "--from: measures nothing, expected no --shapes, --repeats beside it" in message


def test_a_dtype_that_an_option_has_not_is_named(capsys):
    """An int8 cache takes no query of float64."""
    message = refused(capsys, benchmarks.main, "--suite", "decode", "--dtype", "float64")
    assert "--dtype float64: int8:8x32/8x1x4096x128 has no query of this dtype" in message
