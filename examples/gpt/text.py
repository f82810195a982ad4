"""From text to the bytes that a model reads and writes, and back."""

import re

# A line that begins with 4 * depth blanks begins with the byte DEPTH + depth instead: one of the
# control characters from 0x11 to 0x1f, which source text does not use. Otherwise a fifth of
# Python's source would be such blanks. They would fill the context, and what a model writes.
DEPTH = 0x10
DEEPEST = 15
INDENT = b" " * 4


def encode(text: bytes) -> bytes:
    """The text with one byte for the indentation of each line; blanks beyond a multiple of four, or
    beyond DEEPEST, stay."""
    indentation = rb"^(?:%b){1,%d}" % (INDENT, DEEPEST)
    return re.sub(
        indentation, lambda m: bytes([DEPTH + len(m[0]) // len(INDENT)]), text, flags=re.MULTILINE
    )


def decode(tokens: bytes) -> str:
    """The text as the terminal can show it: indentation is blanks again, and what is neither UTF-8
    nor printable is �."""
    for depth in range(1, DEEPEST + 1):
        tokens = tokens.replace(bytes([DEPTH + depth]), INDENT * depth)
    characters = tokens.decode("utf-8", errors="replace")
    return "".join(c if c.isprintable() or c in "\n\t" else "�" for c in characters)
