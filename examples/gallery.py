#!/usr/bin/env python
"""Draws what attention is: one HTML page that needs no other file, and its pictures as PNGs.

gallery.py                            after `make demo`, whose model has the heads that are drawn
gallery.py --checkpoint gpt.pt        the heads of another model that train_gpt.py has trained
gallery.py --steps 0.1                trains the small models of the page a tenth as long
gallery.py --spans spans.png          draws what qkv.Spans show in one picture, and no page

Every picture is computed here and now, by qkv's operators. It takes about two minutes.
"""

import argparse
import math
import os
import sys
from collections.abc import Callable
from pathlib import Path

# The models of the page are small. Threads that sleep between their short parallel regions, and do
# not spin, leave the cores to whatever else runs. This has to be set before torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import matplotlib  # noqa: E402
from tqdm import tqdm  # noqa: E402

from gpt.data import load_corpus  # noqa: E402
from gpt.model import load_attention  # noqa: E402
from gpt.train import load_model  # noqa: E402
from tour import books, dates, heads, masks, sentence, series  # noqa: E402
from tour.chapter import Chapter  # noqa: E402
from tour.page import write_page  # noqa: E402
from tour.style import STYLE  # noqa: E402


def main(argv: list[str] | None = None) -> int:
    parser = make_parser()
    args = parser.parse_args(argv)
    if not 0 < args.steps < math.inf:
        parser.error(f"--steps: expected more than 0, got {args.steps}")
    if args.spans:
        with matplotlib.rc_context(STYLE):
            masks.draw_all().savefig(args.spans)
        return 0
    if not args.checkpoint.exists():
        parser.error(f"--checkpoint: {args.checkpoint} does not exist; `make demo` makes it")
    if args.out.exists() and not args.out.is_dir():
        parser.error(f"--out: {args.out} is no folder")
    with matplotlib.rc_context(STYLE):
        chapters = draw_chapters(args.checkpoint, args.steps)
        page, *pictures = write_page(chapters, args.out)
    print(f"{page}: open it in a browser. Beside it are {len(pictures)} pictures.")
    return 0


def draw_chapters(checkpoint: Path, share: float) -> dict[str, Chapter]:
    """`share` of the steps that each small model is trained for."""

    def steps(count: int) -> int:
        return max(1, round(share * count))

    makers: dict[str, Callable[[], Chapter]] = {
        "dictionary": books.chapter,
        "smoothing": lambda: series.chapter(steps(400)),
        "dates": lambda: dates.chapter(steps(500)),
        "sentence": lambda: sentence.chapter(steps(250)),
        "heads": lambda: heads.chapter(
            load_model(checkpoint, load_attention("qkv")), load_corpus()
        ),
        "masks": masks.chapter,
    }
    progress = tqdm(makers.items(), unit="chapter")
    chapters = {}
    for name, make in progress:
        progress.set_postfix_str(name)
        chapters[name] = make()
    return chapters


def make_parser() -> argparse.ArgumentParser:
    summary, _, usage = __doc__.partition("\n\n")
    parser = argparse.ArgumentParser(
        description=summary,
        epilog=usage,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--out", type=Path, default=Path("gallery"), help="folder (default: gallery)"
    )
    parser.add_argument(
        "--checkpoint",
        type=Path,
        default=Path("demo/gpt.pt"),
        help="the language model's (default: demo/gpt.pt)",
    )
    parser.add_argument(
        "--steps", type=float, default=1.0, metavar="SHARE", help="of the training (default: 1)"
    )
    parser.add_argument("--spans", type=Path, metavar="FILE.png", help="of docs/options.md")
    return parser


if __name__ == "__main__":
    sys.exit(main())
