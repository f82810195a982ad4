"""qkv.viz.plot_attention: what is in the picture."""

import sys

import numpy as np
import pytest
import torch
from common import assert_example_runs
from forks import run_forked

matplotlib = pytest.importorskip("matplotlib")
matplotlib.use("Agg")

from matplotlib import pyplot  # noqa: E402

from qkv.viz import plot_attention  # noqa: E402


@pytest.fixture(autouse=True)
def no_figure_stays():
    yield
    pyplot.close("all")


def weights_of(*shape):
    return torch.randn(shape).softmax(-1)


def labels(axis):
    return [label.get_text() for label in axis.get_ticklabels()]


def image_of(ax):
    (image,) = ax.get_images()
    return image


def colorbars(figure):
    return [ax for ax in figure.axes if ax.get_label() == "<colorbar>"]


def test_one_head():
    weights = weights_of(3, 3)
    ax = plot_attention(weights, ["the", "cat", "sat"])
    assert isinstance(ax, matplotlib.axes.Axes)
    image = image_of(ax)
    np.testing.assert_array_equal(image.get_array(), weights.double().numpy())
    assert image.get_clim() == (0, 1) and ax.get_title() == ""
    assert labels(ax.yaxis) == labels(ax.xaxis) == ["the", "cat", "sat"]
    assert list(ax.get_xticks()) == list(ax.get_yticks()) == [0, 1, 2]
    assert (ax.get_ylabel(), ax.get_xlabel()) == ("query", "key")
    assert [bar.get_ylabel() for bar in colorbars(ax.figure)] == ["attention weight"]
    ax.figure.canvas.draw()
    assert ax.yaxis_inverted()  # the first query is on top
    assert ax.xaxis.get_ticklabels()[0].get_window_extent().y0 > ax.bbox.y1  # above the image


def test_a_picture_shows_the_weights():
    """The pixels: dark where the weight is 1, light where it is 0."""
    ax = plot_attention(torch.eye(2), colorbar=False)
    ax.figure.canvas.draw()
    pixels = np.asarray(ax.figure.canvas.buffer_rgba())[..., :3].sum(-1)
    height = pixels.shape[0]

    def brightness(query, key):
        x, y = ax.transData.transform((key, query))
        return int(pixels[height - 1 - int(y), int(x)])

    for one, other in ((0, 1), (1, 0)):
        assert brightness(one, one) < 100 and brightness(one, other) > 600


@pytest.mark.parametrize("heads, grid", [(1, (1, 1)), (2, (1, 2)), (5, (2, 3)), (8, (3, 3))])
def test_a_grid_of_heads(heads, grid):
    weights = weights_of(heads, 3, 4)
    axes = plot_attention(weights, list("abc"), list("wxyz"))
    assert axes.shape == (heads,)
    for h, ax in enumerate(axes):
        np.testing.assert_array_equal(image_of(ax).get_array(), weights[h].double().numpy())
        assert image_of(ax).get_clim() == (0, 1) and ax.get_title() == f"head {h}"
        assert labels(ax.yaxis) == list("abc") and labels(ax.xaxis) == list("wxyz")
        spec = ax.get_subplotspec()
        assert spec.get_gridspec().get_geometry() == grid
        assert spec.num1 == h
    assert len(axes[0].figure.axes) == heads + 1  # and one colour bar for all of them


def test_given_axes():
    figure, ax = pyplot.subplots()
    assert plot_attention(weights_of(2, 3), ax=ax, colorbar=False) is ax
    assert figure.axes == [ax] and image_of(ax).get_array().shape == (2, 3)
    figure, grid = pyplot.subplots(2, 2)
    axes = plot_attention(weights_of(4, 2, 3), ax=grid, titles=list("abcd"), vmax=0.5, cmap="gray")
    assert list(axes) == list(grid.flat) and [ax.get_title() for ax in axes] == list("abcd")
    assert {image_of(ax).get_clim() for ax in axes} == {(0, 0.5)}
    assert {image_of(ax).get_cmap().name for ax in axes} == {"gray"}
    assert pyplot.get_fignums() == [1, 2]


def test_weights_above_the_scale_are_told_by_the_colour_bar():
    for vmax, extend in ((1.0, "neither"), (0.4, "max")):
        ax = plot_attention(torch.full((2, 2), 0.5), vmax=vmax)
        assert image_of(ax).colorbar.extend == extend


@pytest.mark.parametrize("convert", [
    lambda x: x.bfloat16(), lambda x: x.requires_grad_(), lambda x: x.numpy(), lambda x: x.mT.mT,
])  # fmt: skip
def test_kinds_of_weights(convert):
    weights = torch.tensor([[1.0, 0.0], [0.25, 0.75]])
    expected = weights.numpy().copy()
    np.testing.assert_array_equal(image_of(plot_attention(convert(weights))).get_array(), expected)


def test_labels():
    """Of keys alone; numbers for what has none; dollars are no formula; long ones stand upright."""
    ax = plot_attention(weights_of(2, 3), key_tokens=["$a$", "$", "long"])
    ax.figure.canvas.draw()
    assert labels(ax.xaxis) == ["$a$", "$", "long"]
    assert not any(label.get_parse_math() for label in ax.xaxis.get_ticklabels())
    assert {label.get_rotation() for label in ax.xaxis.get_ticklabels()} == {90}
    inside = [text for text, y in zip(labels(ax.yaxis), ax.get_yticks(), strict=True) if 0 <= y < 2]
    assert inside == ["0", "1"]
    ax = plot_attention(weights_of(3, 3), "abc")
    assert labels(ax.xaxis) == labels(ax.yaxis) == ["a", "b", "c"]
    assert {label.get_rotation() for label in ax.xaxis.get_ticklabels()} == {0}


AXES = object()


@pytest.mark.parametrize("shape, call, message", [
    ((3,), {}, r"weights is \[3\], but \[L, S\] or \[H, L, S\], of one batch item"),
    ((1, 2, 3, 3), {}, r"weights is \[1, 2, 3, 3\]"),
    ((0, 3), {}, r"weights is \[0, 3\], and nothing to draw"),
    ((2, 3), {"tokens": "abc"}, "tokens has 3 entries, but 2, one for each query"),
    ((2, 3), {"tokens": "ab"}, "tokens has 2 entries, but 3, one for each key"),
    ((2, 3), {"key_tokens": "ab"}, "key_tokens has 2 entries, but 3, one for each key"),
    ((2, 3, 3), {"titles": ["a"]}, "titles has 1 entries, but 2, one for each head"),
    ((2, 3, 3), {"ax": AXES}, "ax has 1 entries, but 2, one for each head"),
    ((2, 3, 3), {"ax": [AXES] * 3}, "ax has 3 entries, but 2"),
    ((3, 3), {"ax": [AXES]}, r"ax has 1 entries, but one Axes by itself"),
])  # fmt: skip
def test_bad_call(shape, call, message):
    error = RuntimeError if message.startswith("weights") else ValueError
    with pytest.raises(error, match=f"plot_attention: {message}"):
        plot_attention(torch.zeros(shape), **call)
    assert not pyplot.get_fignums()  # nothing was begun


def test_without_matplotlib(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    with pytest.raises(ImportError, match=r"matplotlib: pip install 'qkv\[viz\]'"):
        plot_attention(torch.eye(2))


def test_importing_qkv_draws_nothing_in():
    code = """
import sys, qkv
print("qkv.viz" in sys.modules, "matplotlib" in sys.modules)
import qkv.viz
print("matplotlib" in sys.modules)
"""
    assert run_forked(code).split() == ["False", "False", "False"]


def test_the_example_runs():
    assert_example_runs(plot_attention)
