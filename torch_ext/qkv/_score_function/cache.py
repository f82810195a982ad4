"""A user's score function as a program, traced once and then looked up: see `traced`."""

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from qkv._recorded import Place, outside, record
from qkv._score_function.instructions import RULES
from qkv._score_function.keys import key_of
from qkv._score_function.lower import FOLDS, LOOKUPS, VIEWS, Lowered, lower

_MOST = 256  # functions; of a number that changes with each call one is kept for each
_IS_KNOWN = (RULES.keys() | LOOKUPS | FOLDS.keys() | VIEWS).__contains__


# Of a key the program, and which of the tensors in the key are the captured ones, in their order.
_known: dict[Any, tuple[Lowered, list[int]]] = {}
_lock = threading.Lock()


def traced(score_mod: Callable[..., Any], dtype: torch.dtype) -> tuple[Lowered, list[Tensor]]:
    """`score_mod` as a program for query's dtype, and what it captures. It is traced the first
    time, and looked up later by its code and by all that it captures; a number that has changed is
    seen. What captures things without a key (`key_of`), or gets tensors in other ways than by its
    closure, its globals and their attributes, is traced for each call.

    Raises:
        Refused: as `lowered` does.
    """
    floating = torch.float64 if dtype == torch.float64 else torch.float32
    try:
        parts, tensors = key_of(score_mod)
        key = (floating, parts)
        found = _known.get(key)
    except Exception:  # also what an attribute raises that is asked for, or a part without a hash
        return lowered(score_mod, floating)
    if found is not None:
        program, order = found
        return program, [tensors[n] for n in order]
    program, captured = lowered(score_mod, floating)
    number = {id(x): n for n, x in enumerate(tensors)}
    if all(id(x) in number for x in captured):
        with _lock:
            while len(_known) >= _MOST:
                _known.pop(next(iter(_known)))
            _known[key] = program, [number[id(x)] for x in captured]
    return program, captured


def lowered(
    score_mod: Callable[..., Any], floating: torch.dtype, here: Callable[[], Place] | None = None
) -> tuple[Lowered, list[Tensor]]:
    """score_mod: of score, batch item, head, query and key, tensors without dimensions, the new
    score; as FlexAttention takes it. floating: of the score. here: as `record` has it.

    Returns:
        Its program, and what it captures.

    Raises:
        Refused: a ValueError; score_mod does what has no instructions. It names the operation, the
            function and its line.
    """
    with outside():  # numbers that score_mod itself has are read
        recording = record(score_mod, [floating, *[torch.int32] * 4], _IS_KNOWN, here)
        program = lower(recording, floating, score_mod)
    return program, [x for x, _ in recording.captured]
