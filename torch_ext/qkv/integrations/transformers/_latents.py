"""Latent attention (MLA): models that cache a latent and a rotary part of each key, the same for
all heads, and have a method `expand_kv` that makes the heads' keys and values of all of them, at
every step. Here the latents go to the attention function as they are."""

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook
from transformers.utils import logging

import qkv
from qkv._functional import has_kernels
from qkv.nn._linear import ConvertedLinear

_logger = logging.get_logger(__name__)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


@dataclass(frozen=True)
class Latents:
    """What stands for both key and value, of H heads, in a call of the attention function. Of a
    tensor it has what models look at, its shape; anything else that a model asks for is an error.

    latents: `[B, 1, S, C]`; rotary: `[B, 1, S, R]`. module: has `kv_b_proj`, which makes a latent
    the heads' `[N]` numbers of a key and their values `[Dv]`."""

    latents: Tensor
    rotary: Tensor
    module: Any

    @property
    def shape(self) -> torch.Size:
        """Of the keys, with the rotary part behind the others: `[B, H, S, N + R]`."""
        batch, _, keys, rotary = self.rotary.shape
        nope = self.module.qk_nope_head_dim
        heads = self.module.kv_b_proj.weight.shape[0] // (nope + self.module.v_head_dim)
        return torch.Size((batch, heads, keys, nope + rotary))

    def __getitem__(self, index: Any) -> "Latents":
        """A part of the keys."""
        return Latents(self.latents[index], self.rotary[index], self.module)

    def expanded(self) -> tuple[Tensor, Tensor]:
        """The keys `[B, H, S, N + R]` and the values `[B, H, S, Dv]`."""
        expand = inspect.unwrap(type(self.module).expand_kv)
        return expand(self.module, self.latents, self.rotary)

    def attend(self, query: Tensor, options: dict[str, Any]) -> Tensor:
        """`[B, H, L, Dv]` of query `[B, H, L, N + R]`."""
        if query.shape[2] == self.shape[2]:
            # In training and for a prompt no keys are of earlier steps. Absorbing multiplies more
            # then, and the module's own way to expand is a single product.
            return qkv.attention(query, *self.expanded(), **options)
        sizes = self.module.qk_nope_head_dim, self.module.v_head_dim
        by_head = self.module.kv_b_proj.weight.unflatten(0, (-1, sum(sizes)))
        weights = by_head.split(sizes, 1)  # of keys [H, N, C] and of values [H, Dv, C]
        nope, rope = query.split([sizes[0], self.rotary.shape[-1]], -1)
        rows = _one_row(self.latents, self.rotary)
        keys = (self.latents, self.rotary) if rows is None else (rows, None)
        return qkv.latent_attention(nope, rope, *keys, *weights, **options)


def unexpanded(
    names: tuple[str, ...], expand: Callable, module: Any, latents: Tensor, rotary: Tensor
) -> tuple[Any, Any]:
    """What `expand_kv` returns, key and value: Latents where the attention function is one of names
    and what expands is a plain weight, else what expand does."""
    if module.config._attn_implementation not in names or not has_kernels(latents):
        return expand(module, latents, rotary)
    why = _why_expanded(module.kv_b_proj, latents)
    if not why:
        found = Latents(latents, rotary, module)
        return found, found
    if not torch.compiler.is_compiling():
        _logger.warning_once(
            f'attn_implementation="qkv": kv_b_proj of {type(module).__name__} {why}; its keys and '
            "values are expanded for all heads in every call"
        )
    return expand(module, latents, rotary)


def _why_expanded(linear: Any, latents: Tensor) -> str:
    """Why more than the product with a weight may happen in a layer, or nothing."""
    if type(linear) not in (nn.Linear, ConvertedLinear):  # an adapter of peft's is a Linear as well
        return f"is a {type(linear).__name__} of {type(linear).__module__}"
    own = "forward" in vars(linear) or any(getattr(linear, hooks) for hooks in _HOOKS)
    if own or _has_any_global_hook():
        return "has hooks"
    if linear.bias is not None:
        return "has a bias"
    weight = linear.weight
    if type(weight) not in (Tensor, nn.Parameter):
        return f"has a weight that is a {type(weight).__name__}"
    same_dtype = weight.dtype == latents.dtype or torch.is_autocast_enabled("cpu")
    if same_dtype and weight.device == latents.device:
        return ""
    return f"has a weight in {weight.dtype} on {weight.device} for {latents.dtype}"


def _one_row(latents: Tensor, rotary: Tensor) -> Tensor | None:
    """Both as `[B, 1, S, C + R]` without a copy, where they lie beside each other, as in
    `LatentCache`."""
    if torch.compiler.is_compiling() or torch.is_grad_enabled():
        return None
    size, end = latents.shape[-1], latents.storage_offset() + latents.shape[-1]
    storage = latents.untyped_storage().data_ptr()
    if (storage, end) != (rotary.untyped_storage().data_ptr(), rotary.storage_offset()):
        return None
    if latents.stride() != rotary.stride() or latents.stride(-1) != 1:
        return None
    return latents.as_strided((*latents.shape[:-1], size + rotary.shape[-1]), latents.stride())


@functools.cache
def expands_latents(attention: type) -> bool:
    """Whether a class has an `expand_kv` that means what is read here, which it is tried for: what
    a later version means otherwise is expanded, so that it costs time and not correctness."""
    latents, rotary, weight = (
        torch.arange(1.0, 1 + n, dtype=torch.float64, device="cpu") for n in (12, 3, 40)
    )
    weight = weight.view(10, 4)  # of 2 heads, 2 + 3 rows each
    sizes = {"qk_nope_head_dim": 2, "v_head_dim": 3, "qk_rope_head_dim": 1}
    module = SimpleNamespace(kv_b_proj=lambda x: x @ weight.mT, **sizes)
    latents, rotary = latents.view(1, 1, 3, 4), rotary.view(1, 1, 3, 1)
    try:
        found = inspect.unwrap(attention.expand_kv)(module, latents, rotary)
        nope, value = (latents @ weight.view(2, 5, 4).mT).split([2, 3], -1)
        expected = torch.cat([nope, rotary.expand(1, 2, 3, 1)], -1), value
        return all(map(torch.equal, found, expected))
    except Exception:
        return False
