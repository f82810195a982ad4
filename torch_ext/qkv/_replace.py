"""torch's own attention functions, computed by qkv."""

import threading
from contextlib import AbstractContextManager
from contextvars import Context
from typing import Any

import torch
import torch.compiler.config
import torch.nn.attention

from qkv._replace_varlen import ReplacedVarlen
from qkv.version import __version__

# The end of torch.compile's cache keys while sdpa is replaced, so that programs that were compiled
# with qkv and without are not taken for one another, nor those of another version. torch keeps them
# from run to run.
_TAG = f"+qkv{__version__}"

_lock = threading.Lock()
active = 0  # how many replacements there are
_varlen: ReplacedVarlen | None = None  # of those that are active, or were last


def _changed(now: int) -> None:
    """now: how many replacements there are. What begins with the first, and ends with the last,
    besides the kernels in C++."""
    global active, _varlen
    before, active = active, now
    # torch has a tag for each thread that has set one, and one for all others.
    config: Any = torch.compiler.config
    of_others = _tagged(Context().run(getattr, config, "cache_key_tag"))
    config._config["cache_key_tag"].env_value_default = of_others
    if config.cache_key_tag != (own := _tagged(config.cache_key_tag)):
        config.cache_key_tag = own
    if active > 0 and before == 0:
        _varlen = ReplacedVarlen()
    elif active == 0 and _varlen is not None:
        _varlen.undo()


def _tagged(tag: str | bool) -> str:
    """The tag with qkv's end as long as there are replacements. bool: torch's reading of "1"."""
    return str(tag).removesuffix(_TAG) + _TAG * (active > 0)


class ReplacedSdpa(AbstractContextManager["ReplacedSdpa", None]):
    """What `replace_sdpa` returns; as a context manager it ends with the block."""

    def __init__(self) -> None:
        with _lock:
            _changed(torch.ops.qkv._replace_sdpa())
        self._active = True

    def undo(self) -> None:
        """Ends it; a second time this does nothing."""
        if self._active:
            self._active = False
            with _lock:
                _changed(torch.ops.qkv._restore_sdpa())

    remove = undo  # the name by which torch's registry of flash attentions calls it

    def __exit__(self, *error: object) -> None:
        self.undo()


def replace_sdpa() -> ReplacedSdpa:
    """From now on qkv computes `torch.nn.functional.scaled_dot_product_attention` of CPU tensors.

    Whoever calls it, from Python, C++ or TorchScript; and the attention in the inference paths of
    torch's layers, which never call it. What qkv does not cover goes to torch as before:
    `sdpa_report` says what went where, and docs/adopt.md what is covered.

    Returns:
        A handle. `undo()` puts torch's kernels back, exactly as they were; leaving a `with` block
        does the same. Dropping the handle does not.

    It is for all threads of the process; replacements may nest and overlap. The first one and the
    last undo change torch's table of kernels: no other thread may be inside attention then. What
    `torch.compile` has compiled stays as it is until `torch.compiler.reset()`.

    Example:
        >>> with qkv.replace_sdpa():
        ...     loss = model(batch)
    """
    return ReplacedSdpa()


class SdpaReport:
    """What `sdpa_report` returns; printed, it is a table.

    taken: the number of calls that qkv computed, by the name of torch's function.
    left: the number of calls that torch computed, by that name and the reason.
    """

    def __init__(self) -> None:
        self.taken: dict[str, int] = {}
        self.left: dict[tuple[str, str], int] = {}
        for function, reason, calls in zip(*torch.ops.qkv._sdpa_report(), strict=True):
            if reason:
                self.left[function, reason] = calls
            else:
                self.taken[function] = calls
        if _varlen is not None and _varlen.calls:
            self.taken["varlen_attn"] = _varlen.calls

    def __repr__(self) -> str:
        rows = [(str(n), function, "qkv") for function, n in self.taken.items()]
        rows += [(str(n), f, f"torch: {reason}") for (f, reason), n in self.left.items()]
        if not rows:
            return "no calls"
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join(f"{n:>{widths[0]}}  {f:<{widths[1]}}  {by}" for n, f, by in rows)


def sdpa_report() -> SdpaReport:
    """What `replace_sdpa` took and what it left to torch, and why.

    Counted are the calls since the first of the replacements that are active, or were last. A
    function under `torch.compile` calls when it is compiled, and not when it runs.

    Example:
        >>> with qkv.replace_sdpa():
        ...     model(batch)
        >>> print(qkv.sdpa_report())
        12  scaled_dot_product_attention  qkv
    """
    return SdpaReport()


def register() -> None:
    """Puts qkv into torch's registry of flash attentions, without activating it."""
    torch.nn.attention.register_flash_attention_impl("qkv", register_fn=replace_sdpa)
