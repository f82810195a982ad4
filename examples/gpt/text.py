"""From text to the bytes that a model reads and writes, and back."""

import re

INDENT = 4  # blanks


def encode(text: bytes) -> bytes:
    """The text with a tab for every four blanks that a line begins with. Else an eighth of Python's
    source would be such blanks: they would fill the context, and much of what the model writes."""
    indentation = rb"^(?: {%d})+" % INDENT
    return re.sub(indentation, lambda m: b"\t" * (len(m[0]) // INDENT), text, flags=re.MULTILINE)


def decode(tokens: bytes) -> str:
    """The text as the terminal can show it: a tab is four blanks again, and what is neither UTF-8
    nor printable is �."""
    characters = tokens.decode("utf-8", errors="replace").replace("\t", " " * INDENT)
    return "".join(c if c.isprintable() or c == "\n" else "�" for c in characters)
