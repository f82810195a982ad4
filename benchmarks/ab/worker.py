"""The process of one build: prepares, checks and times what the other end of its pipes asks
for."""

import statistics
from dataclasses import replace
from pathlib import Path

import torch

import qkv

# qkv, with its operators, is the build's. What measures it and judges its answers is the working
# tree's, for both builds; only that: what qkv itself imports later is the build's again.
qkv.__path__.insert(0, str(Path(__file__).resolve().parents[2] / "torch_ext" / "qkv"))
from qkv.bench import machine  # noqa: E402
from qkv.bench.measure import measure  # noqa: E402

from ..case import Case  # noqa: E402
from ..check import WrongAnswer, check  # noqa: E402
from ..options import parse  # noqa: E402
from ..processes import Failed, serve  # noqa: E402

del qkv.__path__[0]


class Worker:
    """Its methods are what may be asked for."""

    _case: Case

    def describe(self, dtype, threads):
        if threads:
            torch.set_num_threads(threads)
        return machine.describe([getattr(torch, dtype)])

    def prepare(self, spelling, dtype):
        """Makes one call ready, and returns the directions in which it can be timed."""
        self.__dict__.clear()  # before there is another case
        entry = parse(spelling)
        alone = replace(entry.how, ways={}, base=None)  # qkv.testing is yardstick enough
        self._case = Case(replace(entry, how=alone), getattr(torch, dtype))
        self._functions = {}
        return ["forward", "backward"] if self._case.leaves else ["forward"]

    def check(self):
        try:
            check(self._case)
        except WrongAnswer as error:
            raise Failed(f"refused to time a wrong answer: {error}") from None

    def time(self, direction, seconds):
        """Seconds of a call: the median of a turn of so many seconds."""
        if direction not in self._functions:
            self._functions[direction] = self._case.calls["qkv"].timed(direction)
        found = measure({"qkv": self._functions[direction]}, seconds)
        return statistics.median(found["samples_s"]["qkv"])


if __name__ == "__main__":
    serve(Worker())
