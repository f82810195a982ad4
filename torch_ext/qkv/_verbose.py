"""With QKV_VERBOSE=1 in the environment, a warning of every kind of call that is left to others."""

import os
import warnings

import torch
from torch import Tensor

_IS_ON = os.environ.get("QKV_VERBOSE", "") not in ("", "0")
_said: set[str] = set()


def note_left(function: str, query: Tensor, to: str, why: str = "") -> None:
    """Says, the first time, that a call of `function` is computed by `to`, and why: unless said
    otherwise, because of query's device and dtype."""
    if not _IS_ON or torch.compiler.is_compiling():
        return
    why = why or f"the tensors are {query.dtype} on {query.device.type}"
    text = f"qkv: {function} is left to {to}: {why}"
    if text not in _said:
        _said.add(text)
        warnings.warn(text, stacklevel=3)
