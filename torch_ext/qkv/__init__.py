"""The attention operator for PyTorch on CPUs. See `attention`."""

import importlib
from typing import TYPE_CHECKING, Any

from qkv._library import load as _load

_load()  # before anything that calls torch.ops.qkv

from qkv._block_mask import block_mask  # noqa: E402
from qkv._cache import new_cache  # noqa: E402
from qkv._flex import flex_attention  # noqa: E402
from qkv._flops import register as _register_flops  # noqa: E402
from qkv._functional import attention, attention_jvp  # noqa: E402
from qkv._hard import hard_attention  # noqa: E402
from qkv._kvcache import attention_with_kvcache  # noqa: E402
from qkv._latent import latent_attention, latent_attention_with_kvcache  # noqa: E402
from qkv._library import cmake_prefix_path  # noqa: E402
from qkv._machine import (  # noqa: E402
    active_half_products,
    active_isa,
    is_reproducible,
    reproducible,
    set_half_products,
    set_isa,
    set_reproducible,
    supported_isas,
)
from qkv._merge import merge  # noqa: E402
from qkv._replace import ReplacedSdpa, SdpaReport, replace_sdpa, sdpa_report  # noqa: E402
from qkv._replace import register as _register_flash_attention  # noqa: E402
from qkv._replace_flex import ReplacedFlex, replace_flex  # noqa: E402
from qkv._rotate import rotate  # noqa: E402
from qkv._varlen import varlen_attn  # noqa: E402
from qkv._vmap import register as _register_vmap  # noqa: E402
from qkv._weights import attention_weights, attention_with_weights  # noqa: E402
from qkv.spans import Spans  # noqa: E402
from qkv.version import __version__  # noqa: E402

if TYPE_CHECKING:
    from qkv import nn
    from qkv._conversion.convert import Conversion, convert

_register_vmap()
_register_flops()
_register_flash_attention()


def __getattr__(name: str) -> Any:
    """What takes a third of the time that the import would, and most programs do without."""
    if name == "nn":
        return importlib.import_module("qkv.nn")
    if name in ("Conversion", "convert"):
        return getattr(importlib.import_module("qkv._conversion.convert"), name)
    raise AttributeError(f"module 'qkv' has no attribute {name!r}")


__all__ = [
    "Conversion",
    "ReplacedFlex",
    "ReplacedSdpa",
    "SdpaReport",
    "Spans",
    "__version__",
    "active_half_products",
    "active_isa",
    "attention",
    "attention_jvp",
    "attention_weights",
    "attention_with_kvcache",
    "attention_with_weights",
    "block_mask",
    "cmake_prefix_path",
    "convert",
    "flex_attention",
    "hard_attention",
    "is_reproducible",
    "latent_attention",
    "latent_attention_with_kvcache",
    "merge",
    "new_cache",
    "nn",
    "replace_flex",
    "replace_sdpa",
    "reproducible",
    "rotate",
    "sdpa_report",
    "set_half_products",
    "set_isa",
    "set_reproducible",
    "supported_isas",
    "varlen_attn",
]
