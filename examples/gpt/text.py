"""From text to the bytes that a model reads and writes, and back."""

import re

# A run of 4 * n blanks is the one byte RUN + n: one of the control characters from 0x11 to 0x1a,
# which source text does not use. Otherwise a fifth of Python's source would be such blanks. They
# would fill the context, and what a model writes.
RUN = 0x10
LONGEST = 10
BLANKS = b" " * 4


def encode(text: bytes) -> bytes:
    """The text with one byte for a run of blanks; those beyond a multiple of four stay."""
    runs = rb"(?:%b){1,%d}" % (BLANKS, LONGEST)
    return re.sub(runs, lambda run: bytes([RUN + len(run[0]) // len(BLANKS)]), text)


def decode(tokens: bytes) -> str:
    """The text as the terminal can show it: blanks are blanks again, and what is neither UTF-8 nor
    printable is �."""
    for n in range(1, LONGEST + 1):
        tokens = tokens.replace(bytes([RUN + n]), BLANKS * n)
    characters = tokens.decode("utf-8", errors="replace")
    return "".join(c if c.isprintable() or c in "\n\t" else "�" for c in characters)
