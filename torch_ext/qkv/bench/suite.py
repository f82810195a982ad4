"""What one command measures, and how it shows that."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from .entry import Entry
from .table import Table


@dataclass(frozen=True)
class Suite:
    name: str
    entries: tuple[Entry, ...]
    directions: tuple[str, ...]  # of those that Call.timed() knows
    # Text of --shapes -> Entry, or ValueError. Another process, which measures memory, imports it
    # by its name.
    parse: Callable[[str], Entry]
    tables: Callable[[dict], list[Table]]  # of a run, as report.py describes it
    dtypes: tuple[torch.dtype, ...] = (torch.float32,)  # where --dtype does not say
    has_peak: bool = True  # arithmetic is the limit; else memory
    remembered: tuple[str, ...] = ()  # the directions whose memory is always measured

    @property
    def has_gradients(self):
        return self.directions != ("forward",)

    @property
    def has_tangents(self):
        return "jvp" in self.directions
