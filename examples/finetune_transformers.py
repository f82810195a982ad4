#!/usr/bin/env python
"""Fine-tunes a classifier of transformers on qkv's attention: is a text prose or code?

The texts are the docstrings and the code of functions in Python's standard library. Their lengths
differ, so batches are padded, and dropout is on, as in most fine-tuning; qkv neither computes the
padding nor stores what it drops. It needs transformers: `pip install 'qkv[transformers]'`.

    python examples/finetune_transformers.py --save classifier     # a small new BERT
    python examples/finetune_transformers.py --model classifier    # goes on with that one

--model takes whatever from_pretrained takes, so a name such as bert-base-uncased is downloaded.
Without it nothing is, and the first weights are random.
"""

import ast
import random
import sysconfig
from pathlib import Path

import torch
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    ByT5Tokenizer,
)

import qkv.integrations.transformers
from arguments import make_parser

BATCH, LONGEST = 32, 160  # texts in a batch; tokens in a text, the rest of which is cut off


def load_texts() -> list[tuple[str, int]]:
    """Texts and their classes, 0: prose, 1: code. Shuffled, the same each time; as many of one as
    of the other."""
    texts = []
    for file in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        for node in ast.walk(ast.parse(file.read_bytes())):
            if isinstance(node, ast.FunctionDef) and (docstring := ast.get_docstring(node)):
                code = "\n".join(ast.unparse(statement) for statement in node.body[1:])
                texts += [(docstring, 0), (code, 1)] if code else []
    random.Random(0).shuffle(texts)
    return texts


def load_model(name: str | None, attention: str):
    """The tokenizer and the model called `name`, or small new ones; a token of these is a byte."""
    implementation = {"attn_implementation": "sdpa" if attention == "torch" else attention}
    if name is not None:
        model = AutoModelForSequenceClassification.from_pretrained(name, **implementation)
        return AutoTokenizer.from_pretrained(name), model
    tokenizer = ByT5Tokenizer()
    config = BertConfig(
        vocab_size=len(tokenizer), hidden_size=64, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=256, pad_token_id=tokenizer.pad_token_id, num_labels=2,
    )  # fmt: skip
    return tokenizer, AutoModelForSequenceClassification.from_config(config, **implementation)


def to_batch(tokenizer, texts: list[tuple[str, int]]) -> dict[str, torch.Tensor]:
    """What the model takes: tokens and mask, padded to the longest text, and the classes."""
    batch = tokenizer(
        ["? " + text for text, _ in texts],  # BERT's answer is read from the first token
        padding=True, truncation=True, max_length=LONGEST, return_tensors="pt",
    )  # fmt: skip
    return {**batch, "labels": torch.tensor([label for _, label in texts])}


@torch.no_grad()
def accuracy(model, tokenizer, texts: list[tuple[str, int]]) -> float:
    """The share of the texts that are told right."""
    model.eval()
    batches = [to_batch(tokenizer, texts[i : i + BATCH]) for i in range(0, len(texts), BATCH)]
    right = [(model(**batch).logits.argmax(-1) == batch["labels"]).sum() for batch in batches]
    return sum(right).item() / len(texts)


def main(argv: list[str] | None = None) -> tuple[float, float]:
    """Returns the accuracy on held-out texts before training and after it."""
    parser = make_parser(__doc__, steps=150)
    parser.add_argument("--model", help="a name or folder that from_pretrained takes")
    parser.add_argument("--save", help="the folder to write the trained model to")
    parser.add_argument("--attention", choices=("qkv", "torch"), default="qkv")
    args = parser.parse_args(argv)

    qkv.integrations.transformers.register()
    torch.manual_seed(args.seed)
    chance, texts = random.Random(args.seed), load_texts()
    test, train = texts[:200], texts[200:]
    tokenizer, model = load_model(args.model, args.attention)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3 if args.model is None else 1e-4)
    before = accuracy(model, tokenizer, test)
    model.train()
    for step in range(args.steps):
        loss = model(**to_batch(tokenizer, chance.sample(train, BATCH))).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 50 == 0 or step == args.steps - 1:
            print(f"step {step:4}: loss {loss.item():.3f}")
    after = accuracy(model, tokenizer, test)
    print(f"told right of {len(test)} held-out texts: {before:.1%} before, {after:.1%} after")
    if args.save:
        model.save_pretrained(args.save)
        tokenizer.save_pretrained(args.save)
    return before, after


if __name__ == "__main__":
    main()
