"""While a module's forward runs, the scaled_dot_product_attention that it calls is qkv's."""

import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from qkv.functional import attention

_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
# The modes of the modules that are running, of each thread: hooks have nowhere else to keep them.
_running = threading.local()


def route_sdpa(module: nn.Module) -> Callable[[], object]:
    """Returns what undoes it. Hooks, since they stay through copies, pickles and torch.compile."""
    enter = module.register_forward_pre_hook(_enter, prepend=True)
    leave = module.register_forward_hook(_leave, always_call=True)

    def undo() -> None:
        enter.remove()
        leave.remove()

    return undo


class _Route(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            return _attention(*args, **kwargs)
        return func(*args, **kwargs)


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """scaled_dot_product_attention, by torch where qkv has no kernels."""
    args = (query, key, value, attn_mask, dropout_p, is_causal)
    refused_by_torch = attn_mask is not None and is_causal
    if query.device.type != "cpu" or query.dtype not in _DTYPES or refused_by_torch:
        return F.scaled_dot_product_attention(*args, scale=scale, enable_gqa=enable_gqa)
    return attention(*args, scale=scale, enable_gqa=enable_gqa)


def _enter(module: nn.Module, args: Any) -> None:
    if not hasattr(_running, "modes"):
        _running.modes = []
    mode = _Route()
    mode.__enter__()
    _running.modes.append(mode)


def _leave(module: nn.Module, args: Any, output: Any) -> None:
    _running.modes.pop().__exit__(None, None, None)
