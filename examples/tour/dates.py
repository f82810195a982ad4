"""Cross-attention, whose queries come from one sequence and whose keys and values from another: a
reader of dates.

"22 November 2026" is read, "2026-11-22" is written. For each character to write, the writer asks
the characters that were read. It is trained twice: with the scores of the first paper on attention,
which a small network makes for each of the e x d pairs (qkv.nn.AdditiveAttention), and with dot
products (qkv.attention).
"""

import datetime
import random
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import qkv
from qkv.nn import AdditiveAttention
from qkv.viz import plot_attention
from tour.chapter import Chapter
from tour.style import picture

FORMATS = ("{d.day} {d:%B} {d.year}", "{d:%B} {d.day}, {d.year}", "{d:%d.%m.%Y}")
CHARACTERS = "\0" + " ,.-0123456789" + "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
NUMBER = {character: number for number, character in enumerate(CHARACTERS)}
WRITTEN = 10  # the characters of an ISO date
HIDDEN = 64


def draw_date(random_: random.Random) -> tuple[str, str]:
    date = datetime.date(1950, 1, 1) + datetime.timedelta(random_.randrange(36_525))
    return random_.choice(FORMATS).format(d=date), date.isoformat()


def encode(texts: list[str]) -> Tensor:
    """[B, longest], 0 where a text has ended."""
    rows = [torch.tensor([NUMBER[character] for character in text]) for text in texts]
    return nn.utils.rnn.pad_sequence(rows, batch_first=True)


class DotAttention(nn.Module):
    """With the arguments of AdditiveAttention: query and key through a matrix each, then dot
    products."""

    def __init__(self, query_dim: int, key_dim: int, hidden_dim: int):
        super().__init__()
        self.query_proj = nn.Linear(query_dim, hidden_dim, bias=False)
        self.key_proj = nn.Linear(key_dim, hidden_dim, bias=False)

    def forward(self, query, key, value, attn_mask, need_weights=True):
        return qkv.attention_with_weights(
            self.query_proj(query), self.key_proj(key), value, attn_mask
        )


class DateReader(nn.Module):
    def __init__(self, attention: nn.Module):
        super().__init__()
        self.characters = nn.Embedding(len(CHARACTERS), HIDDEN, padding_idx=0)
        self.read = nn.GRU(HIDDEN, HIDDEN, batch_first=True, bidirectional=True)
        self.write = nn.GRU(HIDDEN, HIDDEN, batch_first=True)
        self.attention = attention
        self.to_character = nn.Linear(3 * HIDDEN, len(CHARACTERS))

    def forward(self, source: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
        """Logits [B, d, characters] after each character of `before` [B, d], and the weights
        [B, d, e] over the characters of `source` [B, e]."""
        read, _ = self.read(self.characters(source))
        asking, _ = self.write(self.characters(before))
        is_text = (source != 0).unsqueeze(1)
        found, weights = self.attention(asking, read, read, is_text, need_weights=True)
        return self.to_character(torch.cat((asking, found), -1)), weights

    @torch.no_grad()
    def translate(self, texts: list[str]) -> tuple[list[str], Tensor]:
        """The ISO dates, written a character at a time, and the weights [B, 10, e]."""
        source, written = encode(texts), torch.zeros(len(texts), 1, dtype=torch.long)
        for _ in range(WRITTEN):
            logits, weights = self(source, written)
            best = logits[:, -1, 1:].argmax(-1, keepdim=True) + 1  # 0 is no character
            written = torch.cat((written, best), 1)
        rows = written[:, 1:].tolist()
        return ["".join(CHARACTERS[number] for number in row) for row in rows], weights


SCORERS = {"additive": AdditiveAttention, "dot product": DotAttention}


def train(scorer: str, steps: int, seed: int = 0, batch: int = 64) -> DateReader:
    torch.manual_seed(seed)
    random_ = random.Random(seed)
    model = DateReader(SCORERS[scorer](HIDDEN, 2 * HIDDEN, HIDDEN))
    adam = torch.optim.Adam(model.parameters(), lr=4e-3)
    for _ in range(steps):
        texts, dates = zip(*(draw_date(random_) for _ in range(batch)), strict=True)
        target = encode(list(dates))
        logits, _ = model(encode(list(texts)), F.pad(target[:, :-1], (1, 0)))
        loss = F.cross_entropy(logits.flatten(0, 1), target.flatten())
        adam.zero_grad()
        loss.backward()
        adam.step()
    return model


@dataclass(frozen=True)
class Alignment:
    scorer: str
    source: str
    written: str
    weights: Tensor  # [10, e]
    correct: float  # the share of 200 dates that it has not seen and writes without a mistake


def align(scorer: str, model: DateReader, source: str = "22 November 2026") -> Alignment:
    random_ = random.Random(1_000_003)
    texts, truth = zip(*(draw_date(random_) for _ in range(200)), strict=True)
    found, _ = model.translate(list(texts))
    correct = sum(map(str.__eq__, found, truth)) / len(truth)
    (written,), weights = model.translate([source])
    return Alignment(scorer, source, written, weights[0], correct)


def draw(alignment: Alignment):
    figure, axes = picture(2.7)
    plot_attention(
        alignment.weights, list(alignment.written), list(alignment.source), axes, colorbar=False
    )
    axes.set(xlabel="read (keys and values)", ylabel="to write (queries)")
    axes.set_title(f"Scores: {alignment.scorer}")
    return figure


def chapter(steps: int) -> Chapter:
    alignments = {scorer: align(scorer, train(scorer, steps)) for scorer in SCORERS}
    read, written = (
        len(x) for x in (alignments["additive"].source, alignments["additive"].written)
    )
    return Chapter(
        {
            "correct": {scorer: found.correct for scorer, found in alignments.items()},
            "source": alignments["additive"].source,
            "written": {scorer: found.written for scorer, found in alignments.items()},
            "read_length": read,
            "written_length": written,
            "hidden": HIDDEN,
        },
        {f"dates_{scorer.split()[0]}": draw(found) for scorer, found in alignments.items()},
    )
