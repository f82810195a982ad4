"""What most examples' command lines have in common."""

import argparse
from pathlib import Path


def count(text: str) -> int:
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"expected 1 or more, got {number}")
    return number


def picture_file(text: str) -> Path:
    if not (path := Path(text)).parent.is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {path.parent}")
    return path


def make_parser(doc: str, steps: int, picture: str | None = None) -> argparse.ArgumentParser:
    """Of a script whose docstring is `doc`: ``--steps`` of training, ``--seed``, and the file
    ``--picture``, if it draws one."""
    parser = argparse.ArgumentParser(description=doc.partition("\n")[0])
    parser.add_argument("--steps", type=count, default=steps)
    parser.add_argument("--seed", type=int, default=0)
    if picture:
        parser.add_argument("--picture", type=picture_file, default=picture, metavar="FILE.png")
    return parser
