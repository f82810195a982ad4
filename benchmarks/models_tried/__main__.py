"""Builds a small model of each family of transformers, timm and diffusers, has qkv.convert change
it, and holds it against what it was.

    python -m benchmarks.models_tried --jobs 2 --json FILE      all of them: an hour of one core
    python -m benchmarks.models_tried --only llama 'timm:*'     these
    python -m benchmarks.models_tried --part 3/50               one in fifty, from 0 on
    python -m benchmarks.models_tried --from FILE OLDER         prints docs/models.md of two runs
"""

import argparse
import fnmatch
import json
import sys
from pathlib import Path
from typing import Any

from . import page, pool


def main() -> int:
    description, _, usage = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.models_tried", description=description, epilog=usage,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--only", nargs="+", default=[], metavar="FAMILY")
    parser.add_argument("--part", default="0/1", metavar="K/N", help="one in N, K = 0 up to N - 1")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time")
    parser.add_argument("--timeout", type=float, default=120, help="seconds of one family")
    parser.add_argument("--seconds", type=float, help="families that would begin later are left")
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="what was found is put here, beside what is"
    )  # noqa: E501
    parser.add_argument("--from", dest="read", type=Path, nargs=2, metavar=("FILE", "OLDER"))
    parser.add_argument(
        "--against",
        type=Path,
        metavar="FILE",
        help="fails where a family that was right there is wrong",
    )  # noqa: E501
    options = parser.parse_args()
    if options.read:
        print(page.page(*(json.loads(x.read_text()) for x in options.read)), end="")
        return 0
    part, _, parts = options.part.partition("/")
    names = pool.names()
    for pattern in options.only:
        if not fnmatch.filter(names, pattern):
            parser.error(f"argument --only: no family {pattern}")
    only = [x for x in names if any(fnmatch.fnmatch(x, pattern) for pattern in options.only)]
    names = only or names[int(part) :: int(parts or 1)]
    run: dict[str, Any] = {"about": pool.about(), "families": {}}
    if options.json and options.json.exists():
        run["families"] = json.loads(options.json.read_text())["families"]
    for name, found in pool.run(names, options.jobs, options.timeout, options.seconds):
        run["families"][name] = found
        print(f"{name}: {found['outcome']}  {found['why']}", flush=True)
        if options.json:
            run["families"] = dict(sorted(run["families"].items()))
            options.json.write_text(json.dumps(run, indent=1) + "\n")
    if not options.against:
        return 0
    then = json.loads(options.against.read_text())["families"]
    worse = page.worse(then, run["families"])
    for name in worse:
        print(f"{name} was right, and is not: {run['families'][name]['why']}")
    return bool(worse)


if __name__ == "__main__":
    sys.exit(main())
