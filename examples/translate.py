#!/usr/bin/env python
"""A translator: torch.nn.Transformer learns to write dates out, on qkv's attention.

"11/22/2026", "22.11.2026", "2026-11-22" and "Sun Nov 22 2026" all become "22 November 2026". Python
makes the pairs, and knows how each day is written. It shows qkv.convert on a model of torch's own
layers: an encoder, a causal decoder and the cross-attention between them, with texts of different
lengths padded into one batch. It needs nothing but torch and qkv.

    python examples/translate.py
    python examples/translate.py --attention torch    # the same model on torch's attention
"""

import random
from datetime import date, timedelta

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import qkv
from arguments import make_parser

SPELLINGS = ("%m/%d/%Y", "%d.%m.%Y", "%Y-%m-%d", "%a %b %d %Y")
PAD, START, END = 0, 1, 2  # a token is a byte of ASCII; texts have none of these three
LONGEST = 20  # tokens in a text
WIDTH, HEADS, LAYERS = 64, 4, 2
BATCH = 64


def make_pairs(seed: int) -> list[tuple[str, str]]:
    """Each day of the years 2000 to 2039, in one of the spellings and written out; shuffled."""
    chance = random.Random(seed)
    days = [date(2000, 1, 1) + timedelta(n) for n in range(40 * 365)]
    chance.shuffle(days)
    return [(f"{day:{chance.choice(SPELLINGS)}}", f"{day.day} {day:%B %Y}") for day in days]


def to_tokens(texts: list[str]) -> Tensor:
    """Tokens [B, L], padded to the longest text."""
    rows = [torch.tensor([START, *text.encode(), END]) for text in texts]
    return nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=PAD)


class Translator(nn.Module):
    """Tokens of the sources [B, S] and of the translations so far [B, L] in; logits [B, L, 128] for
    the token that follows each of the latter out."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(128, WIDTH)
        self.position = nn.Parameter(0.1 * torch.randn(LONGEST, WIDTH))
        self.transformer = nn.Transformer(
            WIDTH, HEADS, LAYERS, LAYERS, 2 * WIDTH, dropout=0.1, batch_first=True
        )
        self.transformer.encoder.use_nested_tensor = False  # of a kind that torch warns about
        self.to_logits = nn.Linear(WIDTH, 128)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        hidden, length = source == PAD, target.size(1)
        output = self.transformer(
            self.embed(source) + self.position[: source.size(1)],
            self.embed(target) + self.position[:length],
            tgt_mask=torch.ones(length, length, dtype=torch.bool).triu(1),  # True hides
            tgt_is_causal=True,
            src_key_padding_mask=hidden,
            memory_key_padding_mask=hidden,
        )  # the padding behind a target needs no mask: no token before it sees it
        return self.to_logits(output)


@torch.no_grad()
def translate(model: nn.Module, texts: list[str]) -> list[str]:
    """The translations, token by token, each the likeliest."""
    model.eval()
    source, target = to_tokens(texts), torch.full((len(texts), 1), START)
    while target.size(1) < LONGEST:
        target = torch.cat([target, model(source, target)[:, -1:].argmax(-1)], dim=1)
    return [bytes(row).partition(b"\2")[0].decode() for row in target[:, 1:].tolist()]


def main(argv: list[str] | None = None) -> float:
    """Returns the share of days it was not trained on that are written out without a mistake."""
    parser = make_parser(__doc__, steps=400)
    parser.add_argument("--attention", choices=("qkv", "torch"), default="qkv")
    args = parser.parse_args(argv)

    torch.manual_seed(args.seed)
    pairs = make_pairs(args.seed)
    test, train = pairs[:100], pairs[100:]
    model = Translator()
    if args.attention == "qkv":
        print(qkv.convert(model))
    optimizer = torch.optim.AdamW(model.parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 5e-3, args.steps)
    for step in range(args.steps):
        start = step * BATCH % (len(train) - BATCH)
        source, target = map(to_tokens, zip(*train[start : start + BATCH], strict=True))
        logits = model(source, target[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), target[:, 1:].flatten(), ignore_index=PAD)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % 100 == 0 or step == args.steps - 1:
            print(f"step {step:4}: loss {loss.item():.3f}")

    answers = translate(model, [source for source, _ in test])
    for (source, _), answer in zip(test[:5], answers, strict=False):
        print(f"{source:>15} -> {answer}")
    right = [answer == target for answer, (_, target) in zip(answers, test, strict=True)]
    share = sum(right) / len(right)
    print(
        f"{share:.0%} of {len(test)} days that it was not trained on are written without a mistake"
    )
    return share


if __name__ == "__main__":
    main()
