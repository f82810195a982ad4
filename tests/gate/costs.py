"""What each suite costs, and what it alone has caught: the table of CONTRIBUTING.md.

Processor seconds of test files are written by the tests themselves, into folders of
build/test-logs: pytest's by tests/python/costs.py.
"""

import collections
import json
from pathlib import Path

import tomllib
from tabulate import tabulate
from tasks import LOGS, Outcome

RECORD = LOGS / "costs.json"
CAUGHT = Path(__file__).parent / "caught.toml"
FILES = 12  # that take the most


def record(outcomes: list[Outcome]) -> None:
    """Keeps what the suites of a layer took."""
    suites = {x.task.name: {"wall": x.wall, "cpu": x.cpu} for x in outcomes if x.wall}
    RECORD.write_text(json.dumps(suites, indent=1))


def of_files() -> dict[str, float]:
    """{test file: CPU seconds}, over all processes of pytest."""
    seconds: dict[str, float] = collections.Counter()
    for written in LOGS.glob("*/costs-*.json"):
        for file, cost in json.loads(written.read_text()).items():
            seconds[file] += cost
    return seconds


def table() -> str:
    """Two tables in Markdown, of the last quick layer that ran here: of the suites, and of those
    files of Python's tests that take most."""
    suites = json.loads(RECORD.read_text())
    caught = tomllib.loads(CAUGHT.read_text())
    rows = [
        (f"`{name}`", cost["wall"], cost["cpu"], caught.get(name, ""))
        for name, cost in suites.items()
    ]
    total = sum(cost["cpu"] for cost in suites.values())
    rows.append(("all", None, total, ""))
    head = ("suite", "seconds", "CPU seconds", "what it alone has caught")
    files = sorted(of_files().items(), key=lambda item: -item[1])
    return "\n\n".join([
        tabulate(rows, head, tablefmt="github", floatfmt=".0f", missingval=""),
        tabulate(files[:FILES], ("test file", "CPU seconds"), tablefmt="github", floatfmt=".0f"),
    ])  # fmt: skip
