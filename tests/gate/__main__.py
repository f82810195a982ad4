"""Runs a layer of the tests, and says at the end, on one screen, what ran, how long, what was
skipped and why. The logs are in build/test-logs.

    python tests/gate quick          what every change has to pass (make test)
    python tests/gate commit [HASH]  what is drawn anew for each commit, by its hash (.ci/run)
    python tests/gate long [SEED]    all of it, uncut, with new random inputs (make test-long)
    python tests/gate quick --only csrc python    these suites, and the builds that they need
    python tests/gate costs          what the last quick layer took, as CONTRIBUTING.md has it
"""

import argparse
import os
import random
import subprocess
import sys
import time

import closing
import costs
import slices
import suites
import tasks

LAYERS = ("quick", "commit", "long")


def head() -> str:
    command = ["git", "-C", str(tasks.ROOT), "rev-parse", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def layer(name: str, drawn_by: str | None) -> list[tasks.Task]:
    """drawn_by: the commit's hash, or the seed."""
    if name == "quick":
        os.environ["QKV_QUICK_TESTS"] = "1"
        return suites.quick()
    if name == "commit":
        return slices.commit(drawn_by or head())
    seed = int(drawn_by or random.SystemRandom().randrange(2**31))
    print(f"seed {seed}: everything that is drawn, once more by tests/gate long {seed}")
    return suites.long(seed, int(os.environ.get("FUZZ_CALLS", "20000")))


def chosen(all_tasks: list[tasks.Task], only: list[str]) -> list[tasks.Task]:
    if unknown := set(only) - {task.name for task in all_tasks}:
        sys.exit(f"no suite {', '.join(sorted(unknown))}: {', '.join(t.name for t in all_tasks)}")
    named = {task.name: task for task in all_tasks}
    wanted = list(only or named)
    for name in wanted:  # which grows by what its tasks wait for
        wanted += [before for before in named[name].after if before in named]
    return [task for task in all_tasks if task.name in wanted]


def main() -> int:
    description, _, usage = __doc__.partition("\n\n")
    parser = argparse.ArgumentParser(
        prog="python tests/gate", description=description, epilog=usage,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("layer", choices=(*LAYERS, "costs"))
    parser.add_argument("drawn_by", nargs="?", metavar="HASH or SEED")
    parser.add_argument("--only", nargs="+", default=[], metavar="SUITE")
    options = parser.parse_args()
    if options.layer == "costs":
        print(costs.table())
        return 0
    began = time.monotonic()
    outcomes = tasks.run(
        chosen(layer(options.layer, options.drawn_by), options.only),
        lambda text: print(text, flush=True),
    )
    if options.layer == "quick":
        costs.record(outcomes)
    print()
    print(closing.screen(outcomes, time.monotonic() - began))
    return any(outcome.ended in ("FAILED", "not run") for outcome in outcomes)


if __name__ == "__main__":
    sys.exit(main())
