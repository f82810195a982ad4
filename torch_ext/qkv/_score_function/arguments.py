"""A score function as arguments of the operators: see `arguments_of`."""

from collections.abc import Callable, Container
from typing import Any

import torch
from torch import Tensor

from qkv._refuse import refuse
from qkv._score_function.cache import traced
from qkv._score_function.recognise import Known, options_of
from qkv._watched import is_recorded, untraced


def arguments_of(
    score_mod: Callable[..., Any],
    query: Tensor,
    sizes: tuple[int, int, int, int],
    taken: Container[str],
) -> dict[str, Any]:
    """The keyword arguments that are what it does: a program with its tables, options where it is
    known, or both.

    sizes: B, H, L and S. taken: the options that the caller gives, which are left alone.
    """
    if is_recorded() and not torch.compiler.is_exporting():
        # The options follow from sizes. For torch.jit.trace these are tensors.
        return keywords_of_program(score_mod, query)
    text, known, tables, indices = program_of(score_mod, query)
    left, found = options_of(text, known, tables, sizes, taken)
    return found | _keywords(left, tables, indices) if left else found


def keywords_of_program(score_mod: Callable[..., Any], query: Tensor) -> dict[str, Any]:
    """The keyword arguments of the operators that are a score function, whatever it is."""
    text, _, tables, indices = program_of(score_mod, query)
    return _keywords(text, tables, indices)


def _keywords(text: str, tables: Tensor | None, indices: Tensor | None) -> dict[str, Any]:
    return {"score_program": text, "score_tables": tables, "score_indices": indices}


def program_of(
    score_mod: Callable[..., Any], query: Tensor
) -> tuple[str, Known, Tensor | None, Tensor | None]:
    """The text of its program, what is known in it, and the tables of this call, floating ones and
    those of integers. In what torch.compile traces as well."""
    if not callable(score_mod):
        refuse("score_mod", repr(score_mod), "a function or None is expected")
    if torch.compiler.is_dynamo_compiling():
        from qkv._score_function.compiled import score_program

        text, known, tables, indices = score_program(score_mod, query)
        return text, Known(*known), tables, indices
    with untraced():
        program, captured = traced(score_mod, query.dtype)
    return program.text, program.known, *program.tables(captured, score_mod)
