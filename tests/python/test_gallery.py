"""The gallery: what its chapters compute, and its page in a real browser."""

import base64
import datetime
import functools
import inspect
import pkgutil
import random
import re
import shutil
from pathlib import Path

import jinja2
import pytest
import torch
from matplotlib.figure import Figure

import gallery
import qkv
from gpt.attention_map import attention_maps
from gpt.data import load_corpus
from gpt.model import ModelConfig, load_attention
from gpt.train import TrainConfig, Trainer
from qkv.nn import GaussianSmoothing
from tour import books, dates, heads, masks, page, sentence, series, words
from tour.chapter import Chapter

# The chapters


@pytest.mark.parametrize("query", books.QUERIES)
def test_a_soft_dictionary_comes_to_the_hard_one(query):
    found = books.look_up(query)
    for weights in found.weights:
        assert weights.sum().item() == pytest.approx(1)
        assert list(books.SHELF)[int(weights.argmax())] == found.hard
    best = [float(weights.max()) for weights in found.weights]
    assert best == sorted(best) and best[-1] > 0.7
    torch.testing.assert_close(found.colours[-1], torch.tensor(books.SHELF[found.hard]))


def test_what_python_says():
    assert books.in_a_python_dictionary("The Alchemist") == "The Alchemist"
    assert books.in_a_python_dictionary("alchemy") == "KeyError: 'alchemy'"
    assert books.look_up("alchemy").hard == "The Alchemist"


def test_learned_smoothing_keeps_jumps_apart():
    learned, bell = series.train(200)
    smoothed = series.smooth(learned, bell)
    assert smoothed.learned_error < 0.8 * smoothed.bell_error < 0.8 * smoothed.noise_error
    beyond = slice(smoothed.place + 1, None)
    assert smoothed.learned_weights[beyond].sum() < 0.5 * smoothed.bell_weights[beyond].sum()
    # No other width of the bell curve is much better than the one that was found.
    true, measured = series.draw_series(200, torch.Generator().manual_seed(1))
    errors = {
        sigma: float((GaussianSmoothing(sigma)(measured) - true).square().mean().sqrt())
        for sigma in (0.25, 0.5, 0.75, smoothed.sigma, 1.5, 2.0, 4.0)
    }
    assert errors[smoothed.sigma] < 1.05 * min(errors.values())


@pytest.mark.long
@pytest.mark.parametrize("scorer", dates.SCORERS)
def test_dates_are_read_by_looking_at_them(scorer):
    """After a few steps the year is written, and found where it stands; what is padded is not
    looked at."""
    model = dates.train(scorer, 150)
    written, weights = model.translate(["1 May 1999", "22 November 2026"])
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\d", date) for date in written)
    assert written[0].startswith("199") and written[1].startswith("20")
    assert weights.shape == (2, 10, 16) and weights[1, 2:4, -4:].sum() > 1
    assert weights[0, :, 10:].count_nonzero() == 0 and (weights[1] > 0).all()


@pytest.mark.parametrize("written", dates.FORMATS)
def test_dates_are_dates(written, monkeypatch):
    monkeypatch.setattr(dates, "FORMATS", (written,))
    text, iso = dates.draw_date(random.Random(3))
    assert text == written.format(d=datetime.date.fromisoformat(iso))
    assert set(text + iso) <= set(dates.CHARACTERS)


@pytest.fixture(scope="module")
def gap_filler():
    return words.train(150)


@pytest.mark.long
def test_the_hidden_verb_asks_the_subject(gap_filler):
    model, losses = gap_filler
    assert losses[-1] < 0.3 * losses[0]
    hidden = words.with_gap(words.SENTENCE, sentence.ASKING)
    head = sentence.telling_head(model, hidden, sentence.ASKING, 0)
    steps = words.one_by_one(model, hidden, sentence.ASKING, head)
    assert steps.weights[0] > 0.4 and steps.weights.sum().item() == pytest.approx(1)
    guessed = [word for word, _ in words.guesses(model, hidden, sentence.ASKING)]
    assert {"like", "love"} < set(guessed) and "likes" not in guessed
    singular = words.with_gap(("He", "likes", *words.SENTENCE[2:]), sentence.ASKING)
    assert "likes" in [word for word, _ in words.guesses(model, singular, sentence.ASKING)]


@pytest.mark.long
def test_steps_that_are_not_the_operators_are_found_out(gap_filler, monkeypatch):
    scaled_otherwise = functools.partial(qkv.attention_with_weights, scale=1 / 63**0.5)
    monkeypatch.setattr(qkv, "attention_with_weights", scaled_otherwise)
    with pytest.raises(AssertionError):
        words.one_by_one(gap_filler[0], words.SENTENCE, 1, 0)


def map_of(*habits, text):
    """Weights [1, heads, query, key] in which each head has one of HABITS, or looks at itself."""
    masks = heads.habit_masks(text)
    rows = [masks[habit].float() + 1e-6 * torch.eye(len(text)) for habit in habits]
    return torch.stack([row / row.sum(-1, keepdim=True) for row in rows])[None]


def test_habits_are_recognised():
    text = b"\nclass Box:\n    def __init__(self, width):\n        self.width = width\n"
    every = list(heads.HABITS)
    found = heads.habits(map_of(*every, text=text), text)[0]
    assert [habit.name for habit in found] == every
    assert all(habit.is_clear for habit in found)
    assert found[every.index("before")].distance == pytest.approx(1, abs=0.05)
    alike = torch.ones(len(text), len(text)).tril().softmax(-1).tril()
    alike = (alike / alike.sum(-1, keepdim=True))[None, None]
    (nothing,) = heads.habits(alike, text)[0]
    assert not nothing.is_clear and nothing.breadth > 20


def test_the_layer_whose_heads_differ_most():
    text = b"\nself.width = width\n"
    pairs = (("itself", "itself"), ("before", "first"), ("near", "near"))
    maps = torch.cat([map_of(*pair, text=text) for pair in pairs])
    assert heads.most_different(maps) == 1


def test_the_map_begins_where_a_name_is_found_again():
    text = b"name, other = name"
    maps = torch.zeros(2, 3, len(text), len(text))
    maps[..., 0] = 0.5
    maps[1, 2, 15, 1:3] = 0.4
    maps[0, 1, 8, 1:3] = 1.0  # within no mention
    assert heads.finding_again(maps, text, b"name") == [1, 2, 15]


def test_packed_weights():
    weights = torch.rand(2, 3, 5, 5)
    data = torch.frombuffer(bytearray(base64.b64decode(heads.packed(weights))), dtype=torch.uint8)
    found = (data.float() / 255).square().reshape(weights.shape)
    torch.testing.assert_close(found, weights, rtol=0, atol=4e-3)


def test_each_builder_of_spans_has_its_picture():
    """But BlockMask's, which is FlexAttention's; and no two of them look the same."""
    builders = {n for n, x in vars(qkv.Spans).items() if isinstance(x, staticmethod)}
    assert masks.BUILDERS.keys() == builders - {"from_block_mask"} | {"and", "or"}
    shown = {str(spans.to_mask(masks.L).tolist()) for _, spans, _ in masks.BUILDERS.values()}
    assert len(shown) == len(masks.BUILDERS)
    for name, (code, _, _) in masks.BUILDERS.items():
        assert code.startswith(f"Spans.{name}(") or name in masks.TITLES


@pytest.mark.parametrize("name", masks.BUILDERS)
def test_a_picture_shows_what_attention_sees(name):
    """Blue is a key that has a weight."""
    axes = Figure().subplots()
    masks.paint(axes, name)
    (mesh,) = axes.collections
    drawn = torch.tensor(mesh.get_array()).reshape(masks.L, masks.L)
    query, key = torch.randn(2, masks.L, 8)
    weights = qkv.attention_weights(query, key, spans=masks.BUILDERS[name][1])
    torch.testing.assert_close(drawn, (weights > 0).float().reshape(drawn.shape))


# The table of ideas: docs/examples.md

ROOT = Path(__file__).parents[2]


def ideas():
    """The rows: idea, code, picture, test."""
    lines = (ROOT / "docs/examples.md").read_text().splitlines()
    rows = [line.strip("|").split(" | ") for line in lines if line.startswith("| ")]
    return [[cell.strip() for cell in row] for row in rows[1:]]


@pytest.mark.parametrize("row", ideas(), ids=lambda row: row[0][:40])
def test_each_idea_has_code_and_a_test(row):
    _, code, _, tests = row
    for name in re.findall("`([^`]+)`", code):
        if name.startswith("examples/"):
            assert (ROOT / name).exists()
        elif name.startswith("qkv."):
            pkgutil.resolve_name(name)
        else:
            assert name in inspect.signature(qkv.attention).parameters
    for test in tests.split(", "):
        file, _, function = test.partition("::")
        assert f"def {function}" in (ROOT / "tests/python" / file).read_text()


# The page


def test_prose_and_pictures_fit(tmp_path, monkeypatch):
    monkeypatch.setattr(page, "HERE", tmp_path)
    (tmp_path / "page.html").write_text("{{ heads.found }} {{ picture('one', 'a < b') }}")
    chapters = {"heads": Chapter({"found": 3, "map": {}}, {"one": Figure(figsize=(1, 2))})}
    written = page.write_page(chapters, tmp_path / "out")
    assert [path.name for path in written] == ["index.html", "one.png"]
    assert '3 <img alt="a &lt; b" width="100" height="200"' in written[0].read_text()
    chapters["heads"].pictures["two"] = Figure()
    with pytest.raises(ValueError, match="page.html shows no picture two"):
        page.write_page(chapters, tmp_path / "out")
    del chapters["heads"].facts["found"]
    with pytest.raises(jinja2.UndefinedError, match="found"):
        page.write_page(chapters, tmp_path / "out")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--checkpoint", "none.pt"], "--checkpoint: none.pt does not exist; `make demo` makes it"),
        (["--steps", "0"], "--steps: expected more than 0, got 0"),
        (["--steps", "nan"], "--steps: expected more than 0, got nan"),
        (["--checkpoint", __file__, "--out", __file__], f"--out: {__file__} is no folder"),
    ],
)
def test_bad_arguments(capsys, arguments, message):
    with pytest.raises(SystemExit) as exit:
        gallery.main(arguments)
    assert exit.value.code == 2 and message in capsys.readouterr().err


@pytest.fixture(scope="module")
def trainer():
    config = ModelConfig(layers=2, heads=8, head_dim=8, context=128)
    trainer = Trainer(config, TrainConfig(steps=30), load_corpus(), load_attention("qkv"))
    for _ in range(30):
        trainer.step()
    return trainer


@pytest.fixture(scope="module")
def made(trainer, tmp_path_factory):
    """The folder of a gallery whose models were hardly trained."""
    folder = tmp_path_factory.mktemp("gallery")
    trainer.save(folder / "gpt.pt")
    arguments = ["--checkpoint", str(folder / "gpt.pt"), "--steps", "0.02", "--out", str(folder)]
    assert gallery.main(arguments) == 0
    return folder


@pytest.mark.long  # seven seconds, and `.ci/run` makes the gallery
def test_each_idea_has_its_picture(made):
    """Each picture that the table of ideas names is drawn, and it names each that is drawn."""
    named = {name for row in ideas() for name in re.findall(r"\w+\.png", row[2])}
    named |= {f"head_{number}.png" for number in range(1, 9)}
    assert named == {path.name for path in made.glob("*.png")}


@pytest.fixture(scope="module")
def browser():
    playwright = pytest.importorskip("playwright.sync_api")
    program = shutil.which("chromium") or shutil.which("google-chrome")
    if program is None:
        pytest.skip("no chromium")
    with playwright.sync_playwright() as driver:
        running = driver.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield running
        running.close()


# What the page looks like from within: a picture for each image, and for each text its size.
IMAGES = "[...document.images].map(i => [i.alt, i.naturalWidth, i.clientWidth, i.width])"
TEXTS = """[...document.querySelectorAll('body *')]
  .filter(e => [...e.childNodes].some(n => n.nodeType === 3 && n.textContent.trim()))
  .filter(e => !['SCRIPT', 'STYLE', 'OPTION'].includes(e.tagName))
  .map(e => [e.tagName, parseFloat(getComputedStyle(e).fontSize), e.offsetWidth || 0])"""
COLOURED = """[...document.querySelectorAll('#map .text span')]
  .map(s => Number((s.style.backgroundColor.match(/[\\d.]+(?=\\)$)/) || [1])[0]))"""


def open_page(browser, folder, width):
    """The page, so many pixels wide, and a list of all that it complains about and asks for."""
    said = []
    context = browser.new_context(viewport={"width": width, "height": 900}, has_touch=width < 500)
    tab = context.new_page()
    tab.on("console", lambda message: said.append(message.text))
    tab.on("pageerror", lambda error: said.append(str(error)))
    address = (folder / "index.html").as_uri()
    tab.on("request", lambda r: r.url == address or r.url.startswith("data:") or said.append(r.url))
    tab.goto(address)
    return tab, said


@pytest.mark.long
@pytest.mark.parametrize("width", [400, 1400])
def test_the_page_in_a_browser(browser, made, trainer, width):
    tab, said = open_page(browser, made, width)
    check_layout(tab, width, pictures=len(list(made.glob("*.png"))))
    maps = attention_maps(trainer.model, heads.PASSAGE[: trainer.model.config.context])
    check_map(tab, maps, touch=width < 500)
    assert said == []
    tab.context.close()


def check_layout(tab, width, pictures):
    images = tab.evaluate(IMAGES)
    assert len(images) == pictures > 15
    for alt, natural, shown, drawn_for in images:
        assert alt and natural == 2 * drawn_for  # twice as fine as it is shown
        assert shown >= 0.97 * drawn_for, alt  # so that the text in it is as large as it was drawn
    assert tab.evaluate("document.documentElement.scrollWidth") <= width  # nothing sticks out
    texts = tab.evaluate(TEXTS)
    assert len(texts) > 100
    for tag, size, across in texts:
        assert size >= 12 or tag in ("SUB", "SUP"), tag
        assert across <= 820, tag  # a line that the eye can follow back
    assert tab.title() == "Query, key and value, in pictures"


def check_map(tab, maps, touch):
    """Each of three ways to ask shows the weights that the model has."""
    spans = tab.locator("#map .text span")
    length = maps.size(-1)
    assert spans.count() == length
    for layer, head, query in ((0, 0, length - 3), (1, 7, 20), (1, 2, length - 1)):
        tab.select_option("#layer", str(layer))
        tab.select_option("#head", str(head))
        if touch:
            spans.nth(query).tap()
        else:
            spans.nth(query).hover()
        check_answer(tab, maps[layer, head, query], query)
    tab.locator("#map .text").press("ArrowLeft")
    check_answer(tab, maps[1, 2, length - 2], length - 2)
    tab.select_option("#head", "5")
    check_answer(tab, maps[1, 5, length - 2], length - 2)


def check_answer(tab, weights, query):
    assert tab.locator("#map .text span.asking").get_attribute("data-place") == str(query)
    coloured = torch.tensor(tab.evaluate(COLOURED)) / 0.85
    most = weights.max()
    rounding = 2 / (255 * float(most.sqrt()))  # twice half of a byte's step (tour/heads.py, packed)
    torch.testing.assert_close(coloured, weights / most, rtol=0, atol=rounding)
    shares = re.findall(r"(\d+) %", tab.locator("#map output").inner_text())
    assert abs(int(shares[0]) - 100 * float(weights.max())) < 1.5
