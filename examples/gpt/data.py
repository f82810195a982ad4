"""The training text: the source of Python's standard library, as installed with this Python."""

import hashlib
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from gpt.text import encode

# Left out are tests, other people's packages, and modules that are tables rather than code.
SKIPPED_FOLDERS = {
    "dist-packages",
    "encodings",
    "idle_test",
    "pydoc_data",
    "site-packages",
    "test",
    "tests",
}
VALIDATION_SHARE = 20  # one of this many files is held out
FILE_SEPARATOR = b"\0"


@dataclass(frozen=True)
class Corpus:
    """Files by name within the standard library, and their text in a fixed order: bytes as
    gpt.text encodes them, uint8 [N]."""

    train_files: list[str]
    validation_files: list[str]
    train: Tensor
    validation: Tensor


def is_held_out(name: str) -> bool:
    """Whether a file is held out. The hash of its name decides, so that it keeps its side whatever
    else is installed."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") % VALIDATION_SHARE == 0


def load_corpus(root: Path | None = None) -> Corpus:
    root = root or Path(sysconfig.get_path("stdlib"))
    names = sorted(
        path.relative_to(root).as_posix()
        for path in root.rglob("*.py")
        if not SKIPPED_FOLDERS.intersection(path.relative_to(root).parts)
    )
    train_files = [name for name in names if not is_held_out(name)]
    validation_files = [name for name in names if is_held_out(name)]
    if not train_files or not validation_files:
        raise FileNotFoundError(
            f"expected the source text (*.py) of Python's standard library in {root}, "
            f"found {len(names)} files; on Debian: apt-get install python3"
        )
    return Corpus(
        train_files,
        validation_files,
        _read(root, train_files),
        _read(root, validation_files),
    )


def _read(root: Path, names: list[str]) -> Tensor:
    text = FILE_SEPARATOR.join(encode((root / name).read_bytes()) for name in names)
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def sample_batch(text: Tensor, batch: int, context: int, seed: int) -> tuple[Tensor, Tensor]:
    """Random windows of `text` and the same moved on by one byte, each int64 [batch, context].

    A function of its arguments alone: a run that stops has no position in the data to lose.
    """
    if len(text) <= context:
        raise ValueError(f"context: expected less than the text's {len(text)} bytes, got {context}")
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(text) - context, (batch, 1), generator=generator)
    windows = text[starts + torch.arange(context + 1)].long()
    return windows[:, :-1], windows[:, 1:]
