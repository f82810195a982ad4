"""What the kernels are told about the machine: the instruction set, how half precision is
multiplied, and whether bits may depend on either. The environment variables QKV_ISA,
QKV_HALF_PRODUCTS and QKV_REPRODUCIBLE set them, too."""

import contextlib
from collections.abc import Iterator

import torch


def active_isa() -> str:
    """The instruction set in use: "amx", "avx512bf16", "avx512", "avx2", "neon" or "generic".

    Raises:
        ValueError: QKV_ISA names one that is unknown or that this CPU cannot run.
    """
    return torch.ops.qkv._active_isa()


def supported_isas() -> list[str]:
    """Those that this CPU can run, best first.

    On CPUs with AMX "avx512bf16" comes after "avx512": they multiply bfloat16 in AMX's tiles, and
    in vectors at half the rate of float32.
    """
    return torch.ops.qkv._supported_isas()


def set_isa(name: str) -> None:
    """Use `name` from now on, in all threads.

    Raises:
        ValueError: `name` is unknown, or this CPU cannot run it.
    """
    torch.ops.qkv._set_isa(name)


def active_half_products() -> str:
    """What the factors of a matrix product are in bfloat16 and float16: "native", their own type
    where the instruction set in use multiplies it, or "float32", widened first. docs/semantics.md,
    "Half precision", says what either costs. "native" is the default.

    Raises:
        ValueError: QKV_HALF_PRODUCTS is neither of the two.
    """
    return torch.ops.qkv._half_products()


def set_half_products(name: str) -> None:
    """Use "native" or "float32" from now on, in all threads.

    Raises:
        ValueError: `name` is neither of the two.
    """
    torch.ops.qkv._set_half_products(name)


def is_reproducible() -> bool:
    """Whether results have the same bits on every CPU: see `set_reproducible`.

    Raises:
        ValueError: QKV_REPRODUCIBLE is neither 0 nor 1.
    """
    return torch.ops.qkv._reproducible()


def set_reproducible(yes: bool) -> None:
    """Ask for the same bits on every CPU, and for any number of queries at once, or no longer.

    From now on, in all threads. docs/determinism.md says what is promised, what it costs, and what
    cannot be had: those calls raise NotImplementedError.
    """
    torch.ops.qkv._set_reproducible(yes)


@contextlib.contextmanager
def reproducible(yes: bool = True) -> Iterator[None]:
    """`set_reproducible(yes)` for the body of a `with`, and then as it was. Of all threads."""
    before = is_reproducible()
    set_reproducible(yes)
    try:
        yield
    finally:
        set_reproducible(before)
