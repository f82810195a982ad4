"""The benchmark names bad arguments before it runs."""

import sys

import pytest

from qkv.bench import __main__ as bench

pytestmark = pytest.mark.usefixtures("no_isa_asked_for")


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--shapes", "bort"], "--shapes: 'bort' is not BxHq"),
        (["--shapes", "tiny,"], "--shapes: '' is not BxHq"),
        (["--shapes", "1x2x8x8"], "--shapes: '1x2x8x8' is not BxHq"),
        (["--shapes", "1x3/2x8x8x4"], "2 key/value heads do not divide 3 query heads"),
        (["--shapes", "1x2x0x8x4"], "'1x2x0x8x4': every size must be at least 1"),
        (["--shapes", "flash:1x2x8x8x4"], "'flash' is no option; expected one of plain, "),
        (["--shapes", "window:1x2x8x9x4"], "window needs as many keys as queries"),
        (["--suite", "nothing"], "invalid choice: 'nothing'"),
        (["--shapes", "cache:1x2x1x8x4"], "'cache:1x2x1x8x4': cache is for --suite decode"),
        (["--suite", "decode", "--shapes", "bias:1x2x1x8x4"], "bias is for another suite"),
        (["--suite", "decode", "--shapes", "1x2x1x8x4c"], "sees all keys, expected no 'c'"),
        (["--suite", "derivatives", "--shapes", "varlen:2x2x8x8x4"], "of qkv.attention alone"),
        (["--dtype", "int8"], "--dtype: invalid choice: 'int8' (choose from 'float32', "),
        (["--threads", "0"], "'0', expected a positive int"),
        (["--threads", "two"], "'two', expected a positive int"),
        (["--seconds", "nan"], "'nan', expected a positive float"),
        (["--repeats", "-1"], "'-1', expected a positive int"),
        (["--repeats", "3", "--seconds", "1"], "not allowed with"),
        (["--isa", "sse9"], "--isa: this CPU cannot run 'sse9', expected one of: "),
        (["--json", "no/such/folder/run.json"], "--json: there is no folder no/such/folder"),
        (["--plot", "run.txt"], "--plot: 'run.txt' ends in none of .png, .svg, .pdf"),
    ],
)
def test_bad_arguments_are_named(capsys, arguments, message):
    with pytest.raises(SystemExit) as exit:
        bench.main(arguments)
    assert exit.value.code == 2
    assert message in capsys.readouterr().err


def test_missing_matplotlib_is_named_before_the_run(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(SystemExit):
        bench.main(["--plot", "run.png"])
    assert "matplotlib is missing: pip install matplotlib" in capsys.readouterr().err
