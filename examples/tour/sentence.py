"""A nine-token sentence, step by step: scores, scaling, softmax, weighted values; and what the
matrices W_Q, W_K and W_V do to its words."""

import torch
from torch import Tensor

import qkv
from qkv.viz import plot_attention
from tour.chapter import Chapter
from tour.style import BLUE, GREY, ORANGE, picture
from tour.words import (
    GAP,
    HEAD_DIM,
    SENTENCE,
    WIDTH,
    GapFiller,
    Steps,
    guesses,
    numbers,
    one_by_one,
    train,
    weights_of,
    with_gap,
)

ASKING = 1  # the place of the hidden word, "like"


def telling_head(model: GapFiller, words, at: int, answer: int) -> int:
    """The head in which the word at `at` looks most at the one at `answer`."""
    return int(weights_of(model, words)[:, at, answer].argmax())


def table(steps: Steps) -> list[dict]:
    columns = (steps.scores, steps.scaled, steps.exponentials, steps.weights)
    return [
        {"word": word, "score": s, "scaled": c, "exponential": e, "weight": w}
        for word, s, c, e, w in zip(steps.words, *(x.tolist() for x in columns), strict=True)
    ]


def draw_values(steps: Steps):
    """The first 16 of 64 numbers of each value, faded by its weight, and their sum."""
    figure, axes = picture(3.2)
    shown = slice(0, 16)
    weighted = steps.weights[:, None] * steps.values
    rows = torch.cat((weighted, steps.output[None]))[:, shown]
    most = float(rows.abs().max())
    axes.imshow(rows.numpy(), cmap="RdBu_r", vmin=-most, vmax=most, aspect="auto")
    labels = [
        f"{weight:.0%} of {word}" for word, weight in zip(steps.words, steps.weights, strict=True)
    ]
    axes.set_yticks(range(len(rows)), [*labels, "their sum: the output"])
    axes.axhline(len(labels) - 0.5, color="black", lw=1.2)
    axes.set_xticks([0, 15], ["1", "16"])
    axes.set_xlabel("the first 16 of 64")
    axes.set_title("Values, times their weights")
    return figure


def draw_map(weights: Tensor, words, title: str):
    figure, axes = picture(3.5)
    plot_attention(weights, words, ax=axes, colorbar=False)
    axes.set_title(title, pad=12)
    return figure


def draw_scaling(seed: int = 0):
    """What the largest of nine weights is, for random queries and keys, without and with the
    division by sqrt(D)."""
    generator = torch.Generator().manual_seed(seed)
    dimensions = [2**n for n in range(1, 11)]
    figure, axes = picture(2.5)
    for scaled, colour, label in (
        (False, ORANGE, "scores as they are"),
        (True, BLUE, "divided by $\\sqrt{D}$"),
    ):
        largest = []
        for dimension in dimensions:
            query = torch.randn(500, 1, dimension, generator=generator)
            key = torch.randn(500, 9, dimension, generator=generator)
            scale = dimension**-0.5 if scaled else 1.0
            weights = qkv.attention_weights(query, key, scale=scale)
            largest.append(float(weights.max(-1).values.mean()))
        axes.semilogx(dimensions, largest, "o-", ms=3, color=colour, base=2, label=label)
    axes.axhline(1 / 9, color=GREY, lw=0.8, ls="--", label="all nine alike")
    axes.set(
        xlabel="D, numbers of a query and a key", ylabel="largest of nine weights", ylim=(0, 1)
    )
    axes.legend(loc="center right")
    return figure


@torch.no_grad()
def draw_projections(model: GapFiller, words, head: int):
    """x [9, 512] and what W_Q, W_K and W_V, 512 x 64 each, take out of it for one head."""
    x = model.embed(numbers(words))
    matrices = model.attention.in_proj_weight.unflatten(0, (3, -1, HEAD_DIM))[:, head]
    figure, rows = picture(5.2, nrows=4)
    titles = ("query = x W$_Q$", "key = x W$_K$", "value = x W$_V$")
    parts = [("x: 512 numbers for each word", x)]
    parts += [(t, x @ m.T) for t, m in zip(titles, matrices, strict=True)]
    for axes, (title, part) in zip(rows, parts, strict=True):
        most = 2.5 * float(part.std())
        axes.imshow(
            part.numpy(),
            cmap="RdBu_r",
            vmin=-most,
            vmax=most,
            aspect="auto",
            interpolation="nearest",
        )
        axes.set_title(title if part is x else f"{title}: 64 numbers", weight="normal", fontsize=9)
        axes.set_xticks([0, part.size(1) - 1], ["1", str(part.size(1))])
        axes.set_yticks(range(len(words)), words, fontsize=7)
        if part is not x:  # drawn as narrow as it is, beside the 512
            axes.set_xlim(-0.5, 2.2 * part.size(1))
            axes.spines["bottom"].set_visible(False)
    return figure


@torch.no_grad()
def without_projections(model: GapFiller, words) -> Tensor:
    """The weights [9, 9] that the words' own vectors would give."""
    x = model.embed(numbers(words))
    return qkv.attention_weights(x[None], x[None])[0]


def chapter(steps: int) -> Chapter:
    model, losses = train(steps)
    words = with_gap(SENTENCE, ASKING)
    head = telling_head(model, words, ASKING, 0)
    taken = one_by_one(model, words, ASKING, head)
    weights, plain = weights_of(model, words), without_projections(model, words)
    facts = {
        "words": words,
        "hidden": SENTENCE[ASKING],
        "gap": GAP,
        "head": head,
        "steps": table(taken),
        "total": float(taken.exponentials.sum()),
        "guesses": guesses(model, words, ASKING),
        "subject": float(taken.weights[0]),
        "self_plain": float(plain.diagonal().mean()),
        "losses": (losses[0], sum(losses[-20:]) / len(losses[-20:])),
        "width": WIDTH,
        "head_dim": HEAD_DIM,
    }
    pictures = {
        "values": draw_values(taken),
        "scaling": draw_scaling(),
        "sentence_map": draw_map(weights[head], words, f"Every word asks (head {head + 1})"),
        "projections": draw_projections(model, words, head),
        "without_projections": draw_map(plain, words, "Without matrices"),
        "with_projections": draw_map(weights[head], words, "With W$_Q$ and W$_K$"),
    }
    return Chapter(facts, pictures)
