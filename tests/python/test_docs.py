"""The Python in README.md and docs/ runs as it is written."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = ["README.md", "docs/decoding.md", "docs/options.md"]


@pytest.mark.parametrize("page", PAGES)
def test_examples_run(page):
    """One after the other, in one namespace, as a reader would type them."""
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(), re.S | re.M)
    assert blocks
    names = {}
    for block in blocks:
        exec(compile(block, page, "exec"), names)


def test_every_page_is_tested():
    found = [p for p in ("README.md", "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md")))]
    with_python = [p for p in found if "```python" in (ROOT / p).read_text()]
    assert [str((ROOT / p).relative_to(ROOT)) for p in with_python] == PAGES
