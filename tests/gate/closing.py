"""What a layer says at its end, on one screen: what ran, how long, what was skipped and why."""

import collections
import re

from tabulate import tabulate
from tasks import Outcome

# How GoogleTest, pytest, the fuzzers and tests/headers.sh say how many tests passed.
PASSED = (
    re.compile(r"^\[ +PASSED +\] (\d+) test", re.M),
    re.compile(r"^=+ .*?\b(\d+) passed\b.* in .*=+$", re.M),
    re.compile(r"^\w+: (\d+) held, .* calls", re.M),
    re.compile(r"^(\d+) headers compile", re.M),
)
FAILED = (
    re.compile(r"^\[ +FAILED +\] (\d+) test", re.M),
    re.compile(r"^=+ .*?\b(\d+) failed\b.* in .*=+$", re.M),
    re.compile(r"^=+ .*?\b(\d+) errors?\b.* in .*=+$", re.M),
    re.compile(r"^\w+: .*?\b(\d+) failed\b.* calls", re.M),
)
# Reasons, with how many tests they are the reason of where that is said. GoogleTest's come from
# tests/in_shards.sh.
SKIPPED = re.compile(r"^SKIPPED \[(\d+)\] [^:]*:(?:\d+:)? (.*)$|: Skipped: (.*)$", re.M)
# What names a failure, and what draws it again. Of an error in pytest itself it is the exception:
# the end of the log is then of the process that started the one with the error.
NAMED = re.compile(
    r"^(\[ +FAILED +\] \w+[./].*|FAILED .*|ERROR .*| +\w.* failed, after .*| +once more: .*"
    r"|INTERNALERROR> (?:E +)?[\w.]*(?:Error|Exit): (?!Traceback).*)$",
    re.M,
)
MOST = 12  # lines of each kind
LAST = 8  # of a failed task that names no test


def count(patterns, text: str) -> int:
    return sum(int(found) for pattern in patterns for found in pattern.findall(text))


def reasons(text: str) -> collections.Counter:
    counts: collections.Counter = collections.Counter()
    for number, of_pytest, of_googletest in SKIPPED.findall(text):
        counts[of_pytest or of_googletest] += int(number or 1)
    return counts


def shortened(lines: list[str]) -> list[str]:
    more = [f"and {len(lines) - MOST} more"] if len(lines) > MOST else []
    return [f"  {line[:118]}" for line in lines[:MOST] + more]


def screen(outcomes: list[Outcome], seconds: float) -> str:
    """The closing lines of a layer. The last one is "N passed, N failed, N skipped" over all
    suites, where a task that failed without a failed test counts as one."""
    rows, failures, skips = [], [], collections.Counter()
    totals = collections.Counter()
    for outcome in outcomes:
        name, ended = outcome.task.name, outcome.ended
        text = outcome.task.log.read_text(errors="replace") if outcome.wall else ""
        passed, failed = count(PASSED, text), count(FAILED, text)
        why = reasons(text)
        if outcome.task.skip:
            why[f"{name}: {outcome.task.skip}"] += 1
        if ended == "FAILED":
            failed = failed or 1
            named = list(dict.fromkeys(NAMED.findall(text)))
            # Where no test failed, the end of the log says why, as a compiler's or a shell's does.
            said = named or text.splitlines()[-LAST:]
            failures += [f"{name}: {line.strip()}" for line in said]
            failures += [f"{name}: all of it in {outcome.task.log}"]
        skips += why
        totals += collections.Counter(passed=passed, failed=failed, skipped=sum(why.values()))
        counts = [n or None for n in (passed, failed, sum(why.values()))]
        rows.append([name, ended, *counts, outcome.wall or None, outcome.cpu or None])
    head = ("", "", "passed", "failed", "skipped", "seconds", "CPU seconds")
    lines = [tabulate(rows, head, floatfmt=".0f", missingval="")]
    if skips:
        lines += ["skipped:", *shortened([f"{n} x {why}" for why, n in skips.most_common()])]
    if failures:
        lines += ["failed:", *shortened(failures)]
    lines.append(f"{int(seconds) // 60} min {int(seconds) % 60} s")
    lines.append("{passed} passed, {failed} failed, {skipped} skipped".format_map(
        {"passed": 0, "failed": 0, "skipped": 0} | totals
    ))  # fmt: skip
    return "\n".join(lines)
