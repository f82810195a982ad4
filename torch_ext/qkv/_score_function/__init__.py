"""Score functions of users as programs of instructions (csrc/program): see `trace`."""

from collections.abc import Callable
from typing import Any

import torch

from qkv._score_function.cache import Traced, traced
from qkv._score_function.program import ScoreProgram

__all__ = ["ScoreProgram", "Traced", "trace", "traced"]


def trace(score_mod: Callable[..., Any], dtype: torch.dtype) -> ScoreProgram:
    """The program of a score function with its tables, for query's dtype."""
    found = traced(score_mod, dtype)
    return ScoreProgram(found.lowered.text, *found.tables())
