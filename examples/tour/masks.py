"""Masks as structure: what each builder of qkv.Spans lets a query see, as a picture.

docs/images/spans.png is what `python examples/gallery.py --spans docs/images/spans.png` draws.
"""

import torch
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure

from qkv import Spans
from tour.chapter import Chapter
from tour.style import BLUE, picture

L = 16  # queries, and keys
IDS = torch.tensor([0] * 6 + [1] * 3 + [2] * 7)  # three documents
IMAGES = torch.tensor([-1] * 2 + [0] * 5 + [-1] * 3 + [1] * 4 + [-1] * 2)  # two images in a text
PARENTS = (-1, 0, 1, 1, 0, 4, 4, 6, -1, 8, 9, 9, 8, 12, 13, 13)  # of each draft, the one before
BLOTS = (torch.arange(L)[:, None] * torch.arange(L)) % 5 < 2  # no builder's
CAUSAL = Spans.window(L, right=0)

# {name: (how it is made, the Spans, what it says)}
BUILDERS: dict[str, tuple[str, Spans, str]] = {
    "documents": (
        "Spans.documents(ids)", Spans.documents(IDS),
        "Several texts in one sequence: none sees another.",
    ),
    "groups": (
        "Spans.groups(ids)", Spans.groups(IMAGES),
        "The tokens of an image see each other; what is no image sees nothing yet.",
    ),
    "prefix": (
        "Spans.prefix(6, L)", Spans.prefix(6, L),
        "A question that is read as a whole, and an answer that is written word by word.",
    ),
    "chunks": (
        "Spans.chunks(4, L)", Spans.chunks(4, L),
        "A long text in pieces of the same length.",
    ),
    "window": (
        "Spans.window(L, 2, 2, first=1)", Spans.window(L, 2, 2, first=1),
        "Near words, and a first one that sees all and is seen by all.",
    ),
    "neighborhood": (
        "Spans.neighborhood((4, 4), 3)", Spans.neighborhood((4, 4), 3),
        "An image of 4 × 4 pixels, row by row: each sees the 3 × 3 around it, three intervals.",
    ),
    "tree": (
        "Spans.tree(parents)", Spans.tree(PARENTS),
        "Drafts of how a text goes on: each sees those that it continues.",
    ),
    "from_mask": (
        "Spans.from_mask(mask)", Spans.from_mask(BLOTS),
        "Any other mask, if a query sees few runs of keys.",
    ),
    "and": (
        "Spans.documents(ids) & causal", Spans.documents(IDS) & CAUSAL,
        "What both show: texts in one sequence, none of which looks ahead.",
    ),
    "or": (
        "Spans.groups(ids) | causal", Spans.groups(IMAGES) | CAUSAL,
        "What one of them shows: a text, whose images are seen as a whole.",
    ),
}  # fmt: skip

TITLES = {"and": "documents & causal", "or": "groups | causal"}  # of those without a name


def paint(axes: Axes, name: str) -> None:
    """A row for each query, and in it a square for each key that it sees."""
    seen = BUILDERS[name][1].to_mask(L).float().numpy()
    colours = ListedColormap(["#eef0f3", BLUE])
    axes.pcolormesh(seen, cmap=colours, vmin=0, vmax=1, edgecolor="white", linewidth=0.4)
    axes.set(xticks=[], yticks=[], aspect="equal")
    axes.invert_yaxis()
    axes.spines[:].set_visible(False)
    axes.set_title(TITLES.get(name, name))


def chapter() -> Chapter:
    pictures, builders = {}, []
    for name, (code, spans, says) in BUILDERS.items():
        figure, axes = picture(1.95, width=1.8)
        paint(axes, name)
        pictures[f"spans_{name}"] = figure
        builders.append(
            {"picture": f"spans_{name}", "code": code, "says": says, "count": spans.count}
        )
    return Chapter({"builders": builders, "length": L}, pictures)


def draw_all() -> Figure:
    """All of them in one figure, which docs/options.md shows."""
    figure, rows = picture(4.2, width=10, nrows=2, ncols=5)
    for axes, name in zip(rows.flat, BUILDERS, strict=True):
        paint(axes, name)
    return figure
