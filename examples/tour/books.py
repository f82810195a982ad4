"""A bookshop's shelf as a dictionary: hard, and soft.

The key of a book is its title, as a vector that counts groups of three letters; its value is the
colour of its cover. Titles that are spelt alike have keys that point the same way. Covers can be
mixed, and that is why they are the values here: the average of two telephone numbers is nobody's
number.
"""

import zlib
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from qkv.nn import SoftDictionary
from tour.chapter import Chapter
from tour.style import picture

SHELF = {  # title: red, green and blue of its cover
    "The Alchemist": (0.95, 0.62, 0.10),
    "The Art of War": (0.75, 0.13, 0.15),
    "War and Peace": (0.16, 0.35, 0.67),
    "Alice in Wonderland": (0.36, 0.68, 0.36),
    "The Time Machine": (0.45, 0.30, 0.62),
    "Great Expectations": (0.90, 0.80, 0.45),
    "The Great Gatsby": (0.10, 0.55, 0.60),
    "Moby-Dick": (0.60, 0.66, 0.70),
}
QUERIES = ("The Alchemist", "alchemy", "war")
SCALES = (2.0, 6.0, 30.0)
KEY_DIM = 512


def spelling(text: str) -> Tensor:
    """[512], of length 1: how often each group of three letters occurs, with the groups thrown into
    512 boxes by their checksum."""
    letters = f"  {text.lower()}  "
    groups = [letters[i : i + 3] for i in range(len(letters) - 2)]
    boxes = [zlib.crc32(group.encode()) % KEY_DIM for group in groups]
    return F.normalize(torch.bincount(torch.tensor(boxes), minlength=KEY_DIM).float(), dim=0)


@dataclass(frozen=True)
class Lookup:
    query: str
    hard: str  # the title of the best key
    weights: list[Tensor]  # [8] for each of SCALES
    colours: list[Tensor]  # [3] for each of SCALES, and then the hard one


def look_up(query: str) -> Lookup:
    keys = torch.stack([spelling(title) for title in SHELF])
    covers = torch.tensor(list(SHELF.values()))
    asked = spelling(query)[None]
    results = [SoftDictionary(keys, covers, scale)(asked, need_weights=True) for scale in SCALES]
    hard, choice = SoftDictionary(keys, covers)(asked, hard=True, need_weights=True)
    return Lookup(
        query,
        list(SHELF)[int(choice[0].argmax())],
        [weights[0] for _, weights in results],
        [colour[0] for colour, _ in results] + [hard[0]],
    )


def in_a_python_dictionary(query: str) -> str:
    try:
        SHELF[query]
    except KeyError as error:
        return f"KeyError: {error}"
    return query


def draw(lookup: Lookup):
    """The weights that each scale gives to the books, and the cover that comes out."""
    figure, columns = picture(2.6, ncols=len(SCALES) + 1, sharey=True)
    one_hot = [float(title == lookup.hard) for title in SHELF]
    titles = [f"scale {scale:g}" for scale in SCALES] + ["hard"]
    for axes, weights, colour, title in zip(
        columns,
        [*(w.tolist() for w in lookup.weights), one_hot],
        lookup.colours,
        titles,
        strict=True,
    ):
        axes.barh(range(len(SHELF)), weights, color=list(SHELF.values()), height=0.75)
        axes.barh(len(SHELF) + 0.6, 1.0, height=1.4, color=colour.tolist())
        axes.set(xlim=(0, 1), xticks=[0, 1], xticklabels=["0", "1"])
        axes.set_title(title, weight="normal", fontsize=9)
    columns[0].set_yticks([*range(len(SHELF)), len(SHELF) + 0.6], [*SHELF, "the answer"])
    columns[0].invert_yaxis()
    return figure


def chapter() -> Chapter:
    lookups = [look_up(query) for query in QUERIES]
    facts = {
        "lookups": [
            {
                "query": lookup.query,
                "python": in_a_python_dictionary(lookup.query),
                "hard": lookup.hard,
                "best": float(lookup.weights[1].max()),
                "picture": f"dictionary_{number}",
            }
            for number, lookup in enumerate(lookups, 1)
        ],
        "books": len(SHELF),
    }
    pictures = {f"dictionary_{number}": draw(found) for number, found in enumerate(lookups, 1)}
    return Chapter(facts, pictures)
