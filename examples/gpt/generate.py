"""Text from a trained model, byte by byte."""

from collections.abc import Iterator
from time import perf_counter

import torch

from gpt.model import GPT, KeyValueCache, QkvCache


@torch.no_grad()
def generate(
    model: GPT,
    prompt: bytes,
    length: int,
    temperature: float,
    seed: int,
    cache: type[KeyValueCache] = QkvCache,
) -> Iterator[int]:
    """`length` bytes that follow `prompt`, one at a time. Temperature 0 always takes the
    likeliest."""
    if not prompt:
        raise ValueError("prompt: expected at least one byte, got none")
    if not temperature >= 0:
        raise ValueError(f"temperature: expected 0 or more, got {temperature}")
    generator = torch.Generator().manual_seed(seed)
    step = model.stepper(cache)
    logits = step(torch.tensor([list(prompt)[-model.config.context :]]))
    for _ in range(length):
        if temperature == 0:
            token = logits.argmax()
        else:
            token = torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)
        yield int(token)
        logits = step(token.reshape(1, 1))


def timed(tokens: Iterator[int]) -> tuple[bytes, float]:
    """The `tokens`, and how many came in a second."""
    start = perf_counter()
    text = bytes(tokens)
    return text, len(text) / (perf_counter() - start)
