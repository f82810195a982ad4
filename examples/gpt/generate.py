"""Text from a trained model, byte by byte."""

from collections.abc import Iterator

import torch

from gpt.model import GPT


@torch.no_grad()
def generate(
    model: GPT, prompt: bytes, length: int, temperature: float, seed: int
) -> Iterator[int]:
    """`length` bytes that follow `prompt`, one at a time. Temperature 0: always the likeliest."""
    if not prompt:
        raise ValueError("prompt: expected at least one byte, got none")
    if not temperature >= 0:
        raise ValueError(f"temperature: expected 0 or more, got {temperature}")
    generator = torch.Generator().manual_seed(seed)
    step = model.stepper()
    logits = step(torch.tensor([list(prompt)[-model.config.context :]]))
    for _ in range(length):
        if temperature == 0:
            token = logits.argmax()
        else:
            token = torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)
        yield int(token)
        logits = step(token.reshape(1, 1))


def decode(text: bytes) -> str:
    """For the terminal: what is neither UTF-8 nor printable shows as �."""
    characters = text.decode("utf-8", errors="replace")
    return "".join(c if c.isprintable() or c in "\n\t" else "�" for c in characters)
