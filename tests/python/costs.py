"""CPU seconds of each test file, for tests/gate/costs.py: those of this process and of the ones
that its tests started and waited for."""

import collections
import json
import os
from pathlib import Path

import pytest


class Costs:
    """folder: gets a file of every process of pytest."""

    def __init__(self, folder):
        self.folder = Path(folder)
        self.seconds = collections.Counter()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item):
        before = sum(os.times()[:4])
        try:
            return (yield)
        finally:
            self.seconds[item.path.name] += sum(os.times()[:4]) - before

    def pytest_sessionfinish(self):
        if self.seconds:
            self.folder.mkdir(parents=True, exist_ok=True)
            file = self.folder / f"costs-{os.environ.get('PYTEST_XDIST_WORKER', 'main')}.json"
            file.write_text(json.dumps(self.seconds))
