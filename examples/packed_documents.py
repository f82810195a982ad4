#!/usr/bin/env python
"""Trains a language model on documents of different lengths, with no padding between them.

The documents, functions of Python's standard library, lie one after the other in one row. The
offsets at which they begin and end, `cu_seq`, are all that qkv.varlen_attn needs to keep each to
itself. At the end, held-out documents are computed both ways, packed and padded into a batch: the
loss is the same. The model is that of examples/gpt; it needs nothing but torch and qkv.

    python examples/packed_documents.py
"""

import ast
import random
import sysconfig
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

import qkv
from arguments import make_parser
from gpt.model import GPT, ModelConfig

LONGEST = 1024  # bytes of a document; the rest is cut off
DOCUMENTS = 16  # in a step


def load_documents() -> list[Tensor]:
    """The source text of each function, its bytes as int64 [length]."""
    documents = []
    for file in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        lines = file.read_bytes().splitlines(keepends=True)
        for node in ast.walk(ast.parse(b"".join(lines))):
            if isinstance(node, ast.FunctionDef):
                text = b"".join(lines[node.lineno - 1 : node.end_lineno])
                documents.append(torch.tensor(list(text[:LONGEST])))
    return documents


def attend_within(ends: Tensor, longest: int):
    """Causal attention of query, key and value [1, H, T, D], in which document n has the places
    from `ends[n]` up to `ends[n + 1]`, and sees nothing of the others."""

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))  # [T, H, D]
        output = qkv.varlen_attn(
            query, key, value, ends, ends, longest, longest,
            window_size=(-1, 0),  # any number of keys to the left, none to the right: causal
        )  # fmt: skip
        return output.transpose(0, 1)[None]

    return attend


def packed_loss(model: GPT, documents: list[Tensor]) -> Tensor:
    """The mean loss of all bytes but each document's first, in nats a byte."""
    inputs = torch.cat([document[:-1] for document in documents])
    targets = torch.cat([document[1:] for document in documents])
    lengths = torch.tensor([0] + [len(document) - 1 for document in documents])
    attend = attend_within(lengths.cumsum(0), int(lengths.max()))
    # Positions are rotations, of which attention sees differences only. So they need not begin
    # again at each document.
    table = model.rotary[: len(inputs)]
    logits = model(inputs[None], table, [attend] * model.config.layers)
    return F.cross_entropy(logits[0], targets)


def padded_loss(model: GPT, documents: list[Tensor]) -> Tensor:
    """The same, from a row for each document."""
    rows = torch.nn.utils.rnn.pad_sequence(documents, batch_first=True, padding_value=-1)
    logits = model(rows[:, :-1].clamp(min=0))  # causal: no byte sees the padding behind it
    return F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten(), ignore_index=-1)


def main(argv: list[str] | None = None) -> tuple[float, float]:
    """Returns the loss of held-out documents after training, packed and padded."""
    args = make_parser(__doc__, steps=100).parse_args(argv)

    torch.manual_seed(args.seed)
    documents, chance = load_documents(), random.Random(args.seed)
    chance.shuffle(documents)
    test, train = documents[:DOCUMENTS], documents[DOCUMENTS:]
    config = ModelConfig(layers=2, heads=4, head_dim=16, context=DOCUMENTS * LONGEST)
    model = GPT(config, qkv.attention)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    tokens = padding = 0
    for step in range(args.steps):
        batch = chance.sample(train, DOCUMENTS)
        loss = packed_loss(model, batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        lengths = [len(document) - 1 for document in batch]
        tokens += sum(lengths)
        padding += DOCUMENTS * max(lengths) - sum(lengths)
        if step % 20 == 0 or step == args.steps - 1:
            print(f"step {step:4}: loss {loss.item():.3f}")

    with torch.no_grad():
        packed, padded = packed_loss(model, test).item(), padded_loss(model, test).item()
    print(f"held-out documents: loss {packed:.5f} packed, {padded:.5f} padded")
    print(f"{tokens} tokens were trained on; padding would have added {padding}")
    return packed, padded


if __name__ == "__main__":
    main()
