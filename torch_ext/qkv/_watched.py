"""Where the numbers in tensors are not to be asked for."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor


def is_watched(*tensors: Tensor) -> bool:
    """Whether operators are recorded or faked, or one of these tensors has no numbers of its own:
    then nothing may follow from what is in a tensor, as a branch would."""
    return (
        torch.compiler.is_compiling()
        or torch._C._is_tracing()
        or torch._C._len_torch_dispatch_stack() > 0
        or any(x.is_meta or is_functorch_wrapped_tensor(x) for x in tensors)
    )


def is_recorded() -> bool:
    """Whether what is done is recorded for other sizes as well, with no guard that would see them:
    by torch.jit.trace, torch.export and make_fx, and not by torch.compile."""
    if torch.compiler.is_compiling():
        return torch.compiler.is_exporting()
    kind, ops = torch._C._TorchDispatchModeKey.PROXY, torch._ops
    proxies = torch._C._get_dispatch_mode(kind) or ops._get_dispatch_mode_pre_dispatch(kind)
    return torch._C._is_tracing() or proxies is not None


def untraced() -> AbstractContextManager[None]:
    """Outside of torch.jit.trace, which takes sizes for tensors and crashes where an error of its
    own is caught. What is made here is a constant to it."""
    return _paused() if torch._C._is_tracing() else nullcontext()


@contextmanager
def _paused() -> Iterator[None]:
    tracer: Any = torch._C
    state = tracer._get_tracing_state()
    tracer._set_tracing_state(None)
    try:
        yield
    finally:
        tracer._set_tracing_state(state)
