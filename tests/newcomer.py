#!/usr/bin/env python3
"""Goes the newcomer's path: runs the README's commands, as written and in order, in this checkout.

    tests/newcomer.py --ran 'make test'     all but those that the caller has run already
    tests/newcomer.py --few-steps           the demo and the gallery train a tenth as long

Each block of commands is one shell, as if it were pasted into a terminal. At the end there has to
be what the README promises: a trained model and pictures. On a clean checkout of a fresh machine
this is what someone who has nothing but the README does; .ci/run calls it there. Uses nothing that
does not come with Python.
"""

import argparse
import re
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PROMISED = ("demo/gpt.pt", "demo/losses.png", "gallery/index.html")
# Settings of a command's environment with --few-steps; make takes its ARGS from there.
FEW_STEPS = {"make demo": "ARGS='--seconds 12'", "make gallery": "ARGS='--steps 0.1'"}


def blocks(page: str) -> list[list[str]]:
    """The lines of each block of shell commands."""
    return [block.splitlines() for block in re.findall(r"^```sh\n(.*?)^```", page, re.S | re.M)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ran", action="append", default=[], metavar="COMMAND")
    parser.add_argument("--few-steps", action="store_true")
    options = parser.parse_args()
    ran, fewer = options.ran, FEW_STEPS if options.few_steps else {}
    start, skipped = time.time(), []
    for block in blocks((ROOT / "README.md").read_text()):
        script = []
        for line in block:
            command = line.partition("  #")[0].strip()
            settings = [fewer[command]] if command in fewer else []
            (skipped if command in ran else script).append(" ".join([*settings, command]))
        print("+", "\n+ ".join(script), flush=True)
        shell = ["bash", "-euo", "pipefail", "-c", "\n".join(script)]
        if subprocess.run(shell, cwd=ROOT).returncode:
            print("README.md: these commands failed", file=sys.stderr)
            return 1
    if missing := set(ran) - set(skipped):
        print(f"README.md has no command {', '.join(missing)}", file=sys.stderr)
        return 1
    made = [path for path in PROMISED if (ROOT / path).exists()]
    fresh = [path for path in made if (ROOT / path).stat().st_mtime >= start]
    print("made:", ", ".join(fresh))
    return fresh != list(PROMISED)


if __name__ == "__main__":
    sys.exit(main())
