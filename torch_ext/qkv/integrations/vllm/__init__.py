"""vLLM's attention on CPUs by qkv. See `register`."""

import os

from qkv._library import version_of

__all__ = ["register"]

# Whose interface the classes are written for. There is no wheel of it for CPUs on PyPI: the tests
# run on imitations of its classes.
KNOWN = "0.33"


def register() -> None:
    """Has vLLM use qkv where it would use its own `CPU_ATTN` and `CPU_MLA`, in this process.

    vLLM's workers are processes of their own: they call this where the environment says
    `VLLM_PLUGINS=qkv`, by the entry point that qkv has among vLLM's plugins. docs/adopt.md says
    what is taken over, and what was not tried.

    Raises:
        ImportError: vLLM is missing, or is not of the version that this is written for.
    """
    found = version_of("vllm") or "none"
    if ".".join(found.split(".")[:2]) != KNOWN:
        needs = f"qkv.integrations.vllm is written for vLLM {KNOWN}"
        raise ImportError(f"{needs}, but {found} is installed")
    # vLLM cannot be installed where pyright runs.
    from vllm.v1.attention.backends.registry import (  # pyright: ignore[reportMissingImports]
        AttentionBackendEnum,
        register_backend,
    )

    module = f"{__name__}._backend"
    register_backend(AttentionBackendEnum.CPU_ATTN, f"{module}.Backend")
    register_backend(AttentionBackendEnum.CPU_MLA, f"{module}.LatentBackend")


def plugin() -> None:
    """What vLLM calls in every process where qkv is installed: nothing, unless qkv is named among
    its plugins. Without VLLM_PLUGINS it calls all of them."""
    if "qkv" in os.environ.get("VLLM_PLUGINS", "").split(","):
        register()
