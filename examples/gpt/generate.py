"""Text from a trained model, byte by byte."""

import math
from collections.abc import Iterator
from time import perf_counter

import torch

from gpt.model import GPT


@torch.no_grad()
def generate(
    model: GPT, prompt: bytes, length: int, temperature: float, seed: int, cached: bool = True
) -> Iterator[int]:
    """`length` bytes that follow `prompt`, one at a time. Temperature 0 always takes the likeliest.
    `cached` keeps keys and values; else everything is read again for each byte."""
    if not prompt:
        raise ValueError("prompt: expected at least one byte, got none")
    if not temperature >= 0:
        raise ValueError(f"temperature: expected 0 or more, got {temperature}")
    generator = torch.Generator().manual_seed(seed)
    step = model.stepper() if cached else model.rereader()
    logits = step(torch.tensor([list(prompt)[-model.config.context :]]))
    for _ in range(length):
        if temperature == 0:
            token = logits.argmax()
        else:
            token = torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)
        yield int(token)
        logits = step(token.reshape(1, 1))


def timed(tokens: Iterator[int], seconds: float = math.inf) -> tuple[bytes, float]:
    """The `tokens` that come within `seconds`, at least one, and how many came in a
    second."""
    text, start, passed = bytearray(), perf_counter(), 0.0
    for token in tokens:
        text.append(token)
        passed = perf_counter() - start
        if passed > seconds:
            break
    return bytes(text), len(text) / passed
