"""The instruction set that the kernels use; the environment variable QKV_ISA forces one."""

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
