"""While a module's forward runs, the scaled_dot_product_attention that it calls is qkv's."""

import threading
from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from qkv._functional import attention, has_kernels

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
        if func is F.scaled_dot_product_attention and _is_ours(*args, **kwargs):
            func = attention  # which has the same arguments
        return func(*args, **kwargs)


def _is_ours(
    query: Tensor,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: Any = 0.0,
    is_causal: bool = False,
    **options: Any,
) -> bool:
    """Whether qkv computes this scaled_dot_product_attention. Mask and is_causal together stay
    torch's, which refuses them in some of its ways and applies both in others."""
    return has_kernels(query) and not (is_causal and attn_mask is not None)


def _enter(module: nn.Module, args: Any) -> None:
    if not hasattr(_running, "modes"):
        _running.modes = []
    mode = _Route()
    mode.__enter__()
    _running.modes.append(mode)


def _leave(module: nn.Module, args: Any, output: Any) -> None:
    _running.modes.pop().__exit__(None, None, None)
