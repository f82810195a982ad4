#!/usr/bin/env python
"""Serves several requests at once from one paged cache of keys and values.

Requests arrive at different times, with prompts and answers of different lengths. Each takes blocks
from a pool as it grows, and gives them back when it is done. In between all are decoded together:
a layer has one pool, and a qkv.nn.KVCache for a step, whose block_table says where each of them has
its keys and values. At the end each text is compared with what the model writes alone. The model is
that of examples/gpt, trained for some seconds; it needs nothing but torch and qkv.

    python examples/serve.py
    python examples/serve.py --blocks 10    # a smaller pool: some requests have to wait
"""

import argparse
import random
from dataclasses import dataclass, field, replace
from functools import partial
from time import perf_counter

import torch
import torch.nn.functional as F
from torch import Tensor

import qkv
from gpt.data import load_corpus, sample_batch
from gpt.model import GPT, ModelConfig
from gpt.text import decode

CONFIG = ModelConfig(layers=2, heads=4, head_dim=32, context=128)
BLOCK = 16  # keys in a block
PROMPTS = (
    b"def ", b"import ", b"class Queue:\n", b"raise ValueError(", b"for name in sorted(names):\n",
    b"if self.", b"return ", b"with open(path, encoding='utf-8') as file:\n", b"# This ", b"try:\n",
)  # fmt: skip


@dataclass
class Request:
    prompt: bytes
    length: int  # bytes to write
    arrives: int  # at this step
    written: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)  # their numbers, the same in each layer

    @property
    def keys(self) -> int:
        """The most keys that it has; the last byte written is never read."""
        return len(self.prompt) + self.length - 1

    @property
    def missing_blocks(self) -> int:
        """How many blocks it may still take."""
        return -(-self.keys // BLOCK) - len(self.blocks)


class Server:
    def __init__(self, model: GPT, blocks: int):
        self.model = model
        self.free = list(range(blocks))
        layers = [block.attention for block in model.blocks]
        self.pools = [layer.new_cache(1, blocks * BLOCK, pages=BLOCK) for layer in layers]
        self.running: list[Request] = []

    def has_room_for(self, request: Request) -> bool:
        """Whether there are blocks for all that run to their ends, and for this one."""
        return sum(r.missing_blocks for r in [*self.running, request]) <= len(self.free)

    def start(self, request: Request) -> None:
        self.running.append(request)
        self.advance([request], torch.tensor([list(request.prompt)]), cached=[0])

    def step(self) -> None:
        """Those that are done give their blocks back; all others write one more byte."""
        for request in [r for r in self.running if len(r.written) == r.length]:
            self.free += request.blocks
            self.running.remove(request)
        if self.running:
            last = torch.tensor([[r.written[-1]] for r in self.running])
            cached = [len(r.prompt) + len(r.written) - 1 for r in self.running]
            self.advance(self.running, last, cached)

    @torch.no_grad()
    def advance(self, requests: list[Request], tokens: Tensor, cached: list[int]) -> None:
        """Reads tokens [B, L], a row for each request, of which `cached` tokens were read before.
        Each request writes the byte that follows."""
        for request, before in zip(requests, cached, strict=True):
            while len(request.blocks) * BLOCK < before + tokens.size(1):
                request.blocks.append(self.free.pop())
        tables = [torch.tensor(request.blocks) for request in requests]
        block_table = torch.nn.utils.rnn.pad_sequence(tables, batch_first=True)
        lengths = torch.tensor(cached)

        caches = [replace(p, lengths=lengths, block_table=block_table) for p in self.pools]
        attends = [partial(cache.attend, causal=True) for cache in caches]
        positions = lengths[:, None] + torch.arange(tokens.size(1))
        logits = self.model(tokens, self.model.rotary[positions], attends)[:, -1]
        for request, byte in zip(requests, logits.argmax(-1).tolist(), strict=True):
            request.written.append(byte)


def serve(server: Server, requests: list[Request]) -> tuple[int, int]:
    """Serves them all. Returns the most requests, and the most blocks, that there were at once."""
    waiting, step, blocks = sorted(requests, key=lambda r: r.arrives), 0, len(server.free)
    most_requests = most_blocks = 0
    while waiting or server.running:
        while waiting and waiting[0].arrives <= step and server.has_room_for(waiting[0]):
            server.start(waiting.pop(0))
        server.step()
        most_requests = max(most_requests, len(server.running))
        most_blocks = max(most_blocks, blocks - len(server.free))
        step += 1
    return most_requests, most_blocks


def write_alone(model: GPT, request: Request) -> list[int]:
    """What `request` should get: the same model, with a cache of one piece."""
    step, written = model.stepper(), []
    tokens = torch.tensor([list(request.prompt)])
    while len(written) < request.length:
        tokens = step(tokens).argmax().reshape(1, 1)
        written.append(int(tokens))
    return written


def train(steps: int) -> GPT:
    """A model that has read some Python."""
    model, text = GPT(CONFIG, qkv.attention), load_corpus().train
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(steps):
        inputs, targets = sample_batch(text, 8, CONFIG.context, seed=step)
        loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"the model was trained for {steps} steps, to a loss of {loss.item():.2f}")
    return model.eval()


def main(argv: list[str] | None = None) -> Server:
    """Returns the server when all is done. Raises SystemExit if a text is another than alone."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--blocks", type=int, default=64, help="in the pool (default: 64)")
    parser.add_argument("--steps", type=int, default=200, help="of training (default: 200)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    chance = random.Random(args.seed)
    requests = [Request(p, chance.randint(10, 60), chance.randrange(40)) for p in PROMPTS]
    longest = max(request.keys for request in requests)
    for name, least in {"blocks": -(-longest // BLOCK), "steps": 1}.items():
        if getattr(args, name) < least:
            parser.error(f"--{name}: expected {least} or more, got {getattr(args, name)}")

    torch.manual_seed(args.seed)
    server = Server(train(args.steps), args.blocks)
    start = perf_counter()
    most_requests, most_blocks = serve(server, requests)
    together = perf_counter() - start
    alone = [write_alone(server.model, request) for request in requests]
    apart = perf_counter() - start - together

    for request in requests[:3]:
        print(f"{request.prompt.decode()!r} -> {decode(bytes(request.written))!r}")
    tokens = sum(len(request.written) for request in requests)
    print(f"{tokens} tokens: {tokens / together:.0f}/s together, {tokens / apart:.0f}/s one by one")
    print(
        f"at most {most_requests} requests at once, in {most_blocks} blocks of {BLOCK} keys; "
        f"in one piece for each, {most_requests * longest} keys would have been reserved, "
        f"not {most_blocks * BLOCK}"
    )
    wrong = [r.prompt for r, text in zip(requests, alone, strict=True) if r.written != text]
    if wrong:
        raise SystemExit(f"these prompts get another text alone: {wrong}")
    print("each text is what the model writes alone")
    return server


if __name__ == "__main__":
    main()
