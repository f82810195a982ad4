"""A user's score function as a program: see `trace`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from qkv._recorded import record
from qkv._score_function.instructions import RULES
from qkv._score_function.lower import LOOKUPS, lower
from qkv._score_function.program import ScoreProgram

_IS_KNOWN = (RULES.keys() | LOOKUPS).__contains__


def trace(score_mod: Callable[..., Any], dtype: torch.dtype) -> ScoreProgram:
    """score_mod: of score, batch item, head, query and key, tensors without dimensions, the new
    score; as FlexAttention takes it. dtype: of the query.

    Raises:
        Refused: a ValueError; score_mod does what has no instructions. It names the operation, the
            function and its line.
    """
    floating = torch.float64 if dtype == torch.float64 else torch.float32
    recording = record(score_mod, [floating, *[torch.int32] * 4], _IS_KNOWN)
    code = getattr(score_mod, "__code__", None)
    place = code and (code.co_name, code.co_filename, code.co_firstlineno)

    def name(x: Tensor) -> str:
        return _name(score_mod, x)

    lowered = lower(recording, place or (repr(score_mod), "?", 0), name)
    return lowered.filled([x for x, _ in recording.captured], floating, name)


def _name(function: Any, x: Tensor) -> str:
    """What the function calls a captured tensor."""
    code = getattr(function, "__code__", None)
    if code is not None:
        cells = [cell.cell_contents for cell in function.__closure__ or ()]
        names = dict(zip(code.co_freevars, cells, strict=True))
        names |= {n: function.__globals__.get(n) for n in code.co_names}
        for n, value in names.items():
            if value is x:
                return f"'{n}'"
    return f"a captured tensor of shape {list(x.shape)}"
