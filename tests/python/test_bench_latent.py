"""python -m benchmarks.latent."""

import pytest
import torchvision_operators  # noqa: F401
from bench_runs import markdown_rows

pytest.importorskip("transformers")

from benchmarks import latent  # noqa: E402

SMALL = ["--heads", "2", "--hidden-size", "8", "--keys", "3", "9", "--prompt", "7"]


def test_every_way_is_timed(capsys):
    assert latent.main([*SMALL, "--repeats", "2"]) == 0
    lines = markdown_rows(capsys.readouterr().out)
    titles, _, *rows = ([x.strip() for x in line.strip("|").split("|")] for line in lines)
    calls = ["1 token, 3 keys", "1 token, 9 keys", "prompt of 7", "training, 7"]
    assert [row[1] for row in rows] == 2 * calls
    for row in rows:
        cells = dict(zip(titles, row, strict=True))
        ways = latent.WAYS if "token" in cells["call"] else latent.WAYS[:-2]
        for way in latent.WAYS:
            assert bool(cells[f"{way}, ms"]) == (way in ways)
        assert all(float(cells[f"sdpa / {way}"]) > 0 for way in ways[1:])


def test_prompts_alone(capsys):
    assert latent.main([*SMALL[:4], "--keys", "--prompt", "7", "--repeats", "2"]) == 0
    assert "prompt of 7" in (output := capsys.readouterr().out)
    assert "1 token" not in output


def test_another_result_is_not_timed(capsys, monkeypatch):
    make = latent.make_layers

    def changed(dtype, args):
        layers = make(dtype, args)
        layers["qkv"].scaling *= 1.5
        return layers

    monkeypatch.setattr(latent, "make_layers", changed)
    monkeypatch.setattr(latent, "measure", lambda *_: pytest.fail("timed another layer"))
    assert latent.main(SMALL) == 1
    assert "refused to time another layer: 1 token, 3 keys, " in capsys.readouterr().err
