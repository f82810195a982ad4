"""The heads of a small language model: what each of them looks at, and data for a map that answers
to the pointer. The model is the one that `make demo` trains (gpt/model.py)."""

import base64
import itertools
import re
from dataclasses import dataclass

import torch
from torch import Tensor

from gpt.attention_map import attention_maps
from gpt.data import Corpus
from gpt.model import GPT
from gpt.text import decode, encode
from qkv.viz import plot_attention
from tour.chapter import Chapter
from tour.style import picture

LINE = b"\nself.at = at"  # on which the heads are drawn: it says one name twice
PASSAGE = encode(b"""
class Box:
    def __init__(self, width, height):
        self.width = width
        self.height = height
""")
HABIT_BYTES = 256  # of held-out code, over which habits are counted

HABITS = {
    "itself": "the byte itself",
    "before": "the byte before",
    "near": "two to four bytes back",
    "first": "the first byte of the text",
    "same": "the same byte, earlier",
    "after_same": "what followed the same byte, earlier",
    "beginnings": "the first letters of names",
    "signs": "dots, brackets and other signs",
    "lines": "the ends of lines",
}


def habit_masks(text: bytes) -> dict[str, Tensor]:
    """For each of HABITS the pairs [query, key] that count as it."""
    byte, place = torch.tensor(list(text)), torch.arange(len(text))
    back = place[:, None] - place
    letter = torch.tensor([chr(b).isalnum() or chr(b) == "_" for b in text])
    blank = torch.tensor([decode(bytes([b])).isspace() for b in text])
    same = (byte[:, None] == byte) & (back > 0)
    starts = letter & ~torch.cat((torch.tensor([False]), letter[:-1]))

    def earlier(keys: Tensor) -> Tensor:
        return keys & (back > 0)

    return {
        "itself": back == 0,
        "before": back == 1,
        "near": (back >= 2) & (back <= 4),
        "first": earlier(place == 0),
        "same": same,
        "after_same": same.roll(1, -1) & (back >= 0),
        "beginnings": earlier(starts),
        "signs": earlier(~letter & ~blank),
        "lines": earlier(byte == ord("\n")),
    }


@dataclass(frozen=True)
class Habit:
    """What a head looks at more than if it looked at all that it sees alike: `share` of its weight
    goes there, where `chance` would."""

    name: str  # of HABITS
    share: float
    chance: float
    distance: float  # the mean number of bytes that it looks back
    breadth: float  # the number of bytes among which it shares its weight, by its entropy

    @property
    def is_clear(self) -> bool:
        return self.share >= self.chance + 0.05


def habits(maps: Tensor, text: bytes) -> list[list[Habit]]:
    """Of each layer and head of `maps`, [layers, heads, query, key] over `text`."""
    length = len(text)
    masks = {name: mask.float() for name, mask in habit_masks(text).items()}
    alike = torch.ones(length, length).tril() / torch.arange(1, length + 1)[:, None]
    back = (torch.arange(length)[:, None] - torch.arange(length)).float()

    def habit(weights: Tensor) -> Habit:
        shares = {name: float((weights * mask).sum() / length) for name, mask in masks.items()}
        chances = {name: float((alike * mask).sum() / length) for name, mask in masks.items()}
        name = max(masks, key=lambda name: shares[name] - chances[name])
        distance = float((weights * back).sum() / length)
        entropy = torch.special.entr(weights).sum(-1).mean()
        return Habit(name, shares[name], chances[name], distance, float(entropy.exp()))

    return [[habit(weights) for weights in layer] for layer in maps]


def most_different(maps: Tensor) -> int:
    """The layer whose heads differ most: the mean total variation between two of them."""

    def difference(layer: Tensor) -> float:
        pairs = itertools.combinations(layer, 2)
        gaps = [float((a - b).abs().sum(-1).mean()) / 2 for a, b in pairs]
        return sum(gaps) / max(1, len(gaps))

    return max(range(len(maps)), key=lambda layer: difference(maps[layer]))


def finding_again(maps: Tensor, text: bytes, name: bytes) -> list[int]:
    """[layer, head, query]: of the queries in the last mention of `name`, and of all heads, those
    that look most at the mentions before."""
    mentions = [found.start() for found in re.finditer(re.escape(name), text)]
    keys = [start + i for start in mentions[:-1] for i in range(len(name))]
    looks = maps[:, :, mentions[-1] : mentions[-1] + len(name), keys].sum(-1)
    layer, head, query = torch.unravel_index(looks.argmax(), looks.shape)
    return [int(layer), int(head), mentions[-1] + int(query)]


def shown(byte: int) -> str:
    return {" ": "␣", "\n": "⏎"}.get(chr(byte), chr(byte))


def draw_head(weights: Tensor, line: bytes, title: str):
    figure, axes = picture(2.1, width=1.8)
    plot_attention(weights, [shown(byte) for byte in line], ax=axes, colorbar=False)
    axes.set(xlabel="", ylabel="")
    axes.tick_params(labelsize=7.5)
    axes.set_title(title, pad=4)
    return figure


def packed(maps: Tensor) -> str:
    """The weights as the page reads them: base64 of a byte for each [layer, head, query, key], the
    square root of the weight times 255, which keeps small weights apart."""
    return base64.b64encode((maps.sqrt() * 255).round().byte().numpy().tobytes()).decode()


def chapter(model: GPT, corpus: Corpus) -> Chapter:
    held_out = corpus.validation[: min(HABIT_BYTES, model.config.context)].numpy().tobytes()
    known = habits(attention_maps(model, held_out), held_out)
    maps = attention_maps(model, LINE)
    layer = most_different(maps)
    passage = PASSAGE[: model.config.context]
    on_passage = attention_maps(model, passage)
    pictures = {
        f"head_{number}": draw_head(weights, LINE, f"head {number}")
        for number, weights in enumerate(maps[layer], 1)
    }
    heads = [
        {"picture": name, "habit": habit, "meaning": HABITS[habit.name]}
        for name, habit in zip(pictures, known[layer], strict=True)
    ]
    facts = {
        "layer": layer + 1,
        "layers": model.config.layers,
        "heads": heads,
        "map": {
            "tokens": [decode(bytes([byte])) for byte in passage],
            "layers": model.config.layers,
            "heads": model.config.heads,
            "weights": packed(on_passage),
            "start": finding_again(on_passage, passage, b"width"),
        },
    }
    return Chapter(facts, pictures)
