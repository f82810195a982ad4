"""A layer of attention that guesses the hidden word of a nine-token sentence.

The sentences come from a small grammar, "I like Natural Language Processing , a lot !" among them.
What a hidden word can be follows from the others: "like" or "likes" from the subject, each word of
a topic from the other two, the sign at the end from the words before it. So the word asks, and what
attention learns is where the answer stands.
"""

import random
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import qkv
import qkv.nn

SENTENCE = ("I", "like", "Natural", "Language", "Processing", ",", "a", "lot", "!")
GAP = "[?]"

SUBJECTS = (("I", "You", "We", "They"), ("He", "She"))
VERBS = (("like", "likes"), ("love", "loves"), ("teach", "teaches"), ("enjoy", "enjoys"))
TOPICS = (
    ("Natural", "Language", "Processing"),
    ("Deep", "Reinforcement", "Learning"),
    ("Ancient", "Greek", "Poetry"),
    ("Classical", "Chamber", "Music"),
    ("Modern", "Art", "History"),
    ("Hot", "Apple", "Pie"),
)
ENDS = (("a", "lot", "!"), ("so", "much", "!"), ("a", "bit", "."), ("very", "little", "."))

VOCABULARY = sorted(
    {GAP, ","}
    | {word for group in SUBJECTS + VERBS for word in group}
    | {word for group in TOPICS + ENDS for word in group}
)
NUMBER = {word: number for number, word in enumerate(VOCABULARY)}
LENGTH, WIDTH, HEADS = len(SENTENCE), 512, 8  # the widths of the Transformer's paper
HEAD_DIM = WIDTH // HEADS


def draw_sentence(random_: random.Random) -> list[str]:
    is_third_person = random_.random() < 0.5
    subject = random_.choice(SUBJECTS[is_third_person])
    verb = random_.choice(VERBS)[is_third_person]
    return [subject, verb, *random_.choice(TOPICS), ",", *random_.choice(ENDS)]


def numbers(words) -> Tensor:
    return torch.tensor([NUMBER[word] for word in words])


def with_gap(words, at: int) -> list[str]:
    return [GAP if i == at else word for i, word in enumerate(words)]


class GapFiller(nn.Module):
    """Words [B, 9] in, logits [B, 9, vocabulary] for each of them out."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(len(VOCABULARY), WIDTH)
        self.places = nn.Embedding(LENGTH, WIDTH)
        self.attention = qkv.nn.MultiheadAttention(WIDTH, HEADS, bias=False, batch_first=True)
        self.norm = nn.LayerNorm(WIDTH)
        self.to_word = nn.Linear(WIDTH, len(VOCABULARY))
        for table in (self.words, self.places):
            nn.init.normal_(table.weight, std=0.2)  # of 1, every weight would be 0 or 1 at once

    def embed(self, words: Tensor) -> Tensor:
        """[B, 9, 512], of words and places."""
        return self.words(words) + self.places.weight

    def forward(self, words: Tensor) -> Tensor:
        x = self.embed(words)
        attended, _ = self.attention(x, x, x, need_weights=False)
        return self.to_word(self.norm(x + attended))


def train(steps: int, seed: int = 0, batch: int = 64) -> tuple[GapFiller, list[float]]:
    """The trained layer, and the loss of each step: the cross-entropy of the hidden words."""
    torch.manual_seed(seed)
    random_, model, losses = random.Random(seed), GapFiller(), []
    adam = torch.optim.Adam(model.parameters(), lr=3e-4)
    for _ in range(steps):
        words = torch.stack([numbers(draw_sentence(random_)) for _ in range(batch)])
        gap = torch.tensor([random_.randrange(LENGTH) for _ in range(batch)])
        rows = torch.arange(batch)
        holed = words.index_put((rows, gap), torch.tensor(NUMBER[GAP]))
        loss = F.cross_entropy(model(holed)[rows, gap], words[rows, gap])
        adam.zero_grad()
        loss.backward()
        adam.step()
        losses.append(loss.item())
    return model, losses


@dataclass(frozen=True)
class Steps:
    """Every number on the way of one query through one head of 64 dimensions."""

    words: list[str]  # with the gap
    head: int
    query: Tensor  # [64], of the gap
    keys: Tensor  # [9, 64]
    values: Tensor  # [9, 64]
    scores: Tensor  # [9], dot products
    scaled: Tensor  # [9], divided by sqrt(64)
    exponentials: Tensor  # [9]
    weights: Tensor  # [9], their sum is 1
    output: Tensor  # [64], the values' average by the weights


@torch.no_grad()
def project(model: GapFiller, words) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value of each head, [8, 9, 64] each."""
    x = model.embed(numbers(words))
    projected = x @ model.attention.in_proj_weight.T  # [9, 3 * 512]
    return tuple(
        part.unflatten(-1, (HEADS, HEAD_DIM)).transpose(0, 1) for part in projected.split(WIDTH, -1)
    )


@torch.no_grad()
def weights_of(model: GapFiller, words) -> Tensor:
    """[8, 9, 9]"""
    query, key, _ = project(model, words)
    return qkv.attention_weights(query, key)


@torch.no_grad()
def one_by_one(model: GapFiller, words, at: int, head: int) -> Steps:
    """The steps, taken by hand, for the word at place `at`. Raises AssertionError if the operator
    comes to something else."""
    query, key, value = (x[head] for x in project(model, words))
    scores = key @ query[at]
    scaled = scores / HEAD_DIM**0.5
    exponentials = scaled.exp()
    weights = exponentials / exponentials.sum()
    output = weights @ value
    operator = qkv.attention_with_weights(query[None, at : at + 1], key[None], value[None])
    torch.testing.assert_close((output, weights), tuple(x[0, 0] for x in operator))
    return Steps(
        list(words), head, query[at], key, value, scores, scaled, exponentials, weights, output
    )


@torch.no_grad()
def guesses(model: GapFiller, words, at: int, count: int = 4) -> list[tuple[str, float]]:
    """The likeliest words for place `at`, with their probabilities."""
    best = model(numbers(words)[None])[0, at].softmax(-1).topk(count)
    return [
        (VOCABULARY[number], probability)
        for number, probability in zip(best.indices.tolist(), best.values.tolist(), strict=True)
    ]
