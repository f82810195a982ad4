"""torch's own flex_attention, computed by qkv."""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager
from types import CodeType, FunctionType
from typing import Any

_lock = threading.Lock()
active: list[ReplacedFlex] = []
_torchs: FunctionType | None = None  # torch's function under another name, while it is replaced


def _replacement(  # whose code runs among the globals of torch's function
    query, key, value, score_mod=None, block_mask=None, scale=None, enable_gqa=False,
    return_lse=False, kernel_options=None, *, return_aux=None,
):  # fmt: skip
    from qkv._flex import flex_attention

    return flex_attention(
        query, key, value, score_mod, block_mask, scale, enable_gqa, return_lse, kernel_options,
        return_aux=return_aux,
    )  # fmt: skip


def torchs_own() -> Any:
    """torch's function, as it is while it is not replaced."""
    from torch.nn.attention.flex_attention import flex_attention

    return _torchs if active else flex_attention


class ReplacedFlex(AbstractContextManager["ReplacedFlex", None]):
    """What `replace_flex` returns; as a context manager it ends with the block."""

    def __init__(self) -> None:
        from torch.nn.attention.flex_attention import flex_attention

        global _torchs
        self._function: Any = flex_attention
        with _lock:
            if not active:
                code: CodeType = self._function.__code__
                _torchs = FunctionType(code, self._function.__globals__, code.co_name)
                _torchs.__defaults__ = self._function.__defaults__
                _torchs.__kwdefaults__ = self._function.__kwdefaults__
                self._function.__code__ = _replacement.__code__
            active.append(self)

    def undo(self) -> None:
        """Ends it; a second time this does nothing."""
        with _lock:
            if self in active:
                active.remove(self)
                if not active and _torchs is not None:
                    self._function.__code__ = _torchs.__code__

    def __exit__(self, *error: object) -> None:
        self.undo()


def replace_flex() -> ReplacedFlex:
    """From now on qkv computes `torch.nn.attention.flex_attention.flex_attention` of CPU tensors.

    Whoever calls it, by whatever name it was imported, under `torch.compile` as well.
    `flex_attention` says what it does, and which score_mod is an error. What qkv does not cover
    goes to torch as before: other devices and other dtypes.

    Returns:
        A handle, as `replace_sdpa` returns it.

    It is for all threads of the process, may be nested, and ends when the last one is undone.
    Functions that `torch.compile` has compiled before are compiled anew.

    Example:
        >>> with qkv.replace_flex():
        ...     loss = model(batch)
    """
    return ReplacedFlex()
