"""A user's score function as a program: see `lowered`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from qkv._recorded import Place, record
from qkv._score_function.instructions import RULES
from qkv._score_function.lower import LOOKUPS, Lowered, lower
from qkv._score_function.rows import FOLDS, unroll

_IS_KNOWN = (RULES.keys() | LOOKUPS | FOLDS.keys() | {"unsqueeze"}).__contains__


def lowered(
    score_mod: Callable[..., Any],
    floating: torch.dtype,
    here: Callable[[], Place] | None = None,
) -> tuple[Lowered, list[Tensor]]:
    """score_mod: of score, batch item, head, query and key, tensors without dimensions, the new
    score; as FlexAttention takes it. floating: of the score. here: as `record` has it.

    Returns:
        Its program, and what it captures.

    Raises:
        Refused: a ValueError; score_mod does what has no instructions. It names the operation, the
            function and its line.
    """
    recording = record(score_mod, [floating, *[torch.int32] * 4], _IS_KNOWN, here)
    unroll(recording)
    code = getattr(score_mod, "__code__", None)
    place = code and (code.co_name, code.co_filename, code.co_firstlineno)
    program = lower(recording, floating, place or (repr(score_mod), "?", 0), name_in(score_mod))
    return program, [x for x, _ in recording.captured]


def name_in(function: Any) -> Callable[[Tensor], str]:
    """What the function calls a captured tensor, for errors."""
    return functools.partial(_name, function)


def _name(function: Any, x: Tensor) -> str:
    code = getattr(function, "__code__", None)
    if code is not None:
        cells = [cell.cell_contents for cell in function.__closure__ or ()]
        names = dict(zip(code.co_freevars, cells, strict=True))
        names |= {n: function.__globals__.get(n) for n in code.co_names}
        for n, value in names.items():
            if value is x:
                return f"'{n}'"
    return f"a captured tensor of shape {list(x.shape)}"
