"""`attn_implementation="qkv"` for transformers' models. See `register`."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from qkv._library import version_of
from qkv._recorded import outside

if TYPE_CHECKING:
    from qkv.integrations.transformers._latent_cache import LatentCache, StaticLatentCache

__all__ = ["LatentCache", "StaticLatentCache", "register", "unregister"]

# What models are told to use. The second is how continuous batching was asked for once;
# transformers takes "paged|" off again, and warns.
NAMES = ("qkv", "paged|qkv")
# What a model has instead that also writes attention out in its own code: the masks of "eager",
# which are added to scores, since its layers share them.
ADDED = "qkv_added_masks"
TRIED = ("5.22", "5.24")  # the first and the last version that the integration was tried with


def register(*, kernels: bool = False) -> None:
    """Makes `attn_implementation="qkv"` known to transformers. Calling it again changes nothing.

    Every model whose attention goes through transformers' `AttentionInterface` then takes it, in
    `from_pretrained`, `from_config` or `set_attn_implementation`. Results are what they are with
    `"eager"`, but that a query that may see nothing gets 0. What is not on the CPU, or of a dtype
    that qkv does not have, goes to transformers' own `sdpa`. docs/adopt.md says what
    becomes of models with attention of their own.

    Args:
        kernels: models that are given that attention afterwards also rotate query and key, and
            compute their RMS norms, by `qkv.rotate`: docs/adopt.md says which.

    Raises:
        ImportError: transformers is missing, or older than this was written for.
        NotImplementedError: not here but in a model's forward pass, where a model asks its
            attention for something that would have to be left out.

    Example:
        >>> import transformers, qkv.integrations.transformers
        >>> qkv.integrations.transformers.register()
        >>> config = transformers.LlamaConfig(attn_implementation="qkv")
        >>> model = transformers.LlamaForCausalLM(config)
    """
    _check_version()
    from transformers import AttentionInterface, masking_utils

    with trials():  # of what mask functions mean
        from qkv.integrations.transformers import _own_attention, _private
        from qkv.integrations.transformers._attention import attention_forward
        from qkv.integrations.transformers._masks import make_mask

    mask_functions = dict.fromkeys(NAMES, make_mask) | {ADDED: _private.eager_mask}
    for name, mask_function in mask_functions.items():
        # Where masks are added, no mask hides nothing, whatever a layer's is_causal says.
        given = {"is_causal": False} if name == ADDED else {}
        AttentionInterface.register(name, partial(attention_forward, **given))
        masking_utils.AttentionMaskInterface.register(name, mask_function)
    _own_attention.batch_continuously(mask_functions)
    _own_attention.find_out()
    if kernels:
        _own_attention.replace_others(True)


def unregister() -> None:
    """Undoes `register`: the names are unknown again, and models rotate and norm by their own code.

    A model that still says `"qkv"` fails in its next call: give it another attention before, by
    `model.set_attn_implementation("sdpa")`.
    """
    from transformers import AttentionInterface, masking_utils

    from qkv.integrations.transformers import _own_attention, _private

    for interface in (AttentionInterface, masking_utils.AttentionMaskInterface):
        for name in (*NAMES, ADDED):
            getattr(interface, _private.REGISTERED).pop(name, None)
    _own_attention.replace_others(False)


def __getattr__(name: str) -> Any:
    """The caches, whose bases are classes of transformers, which is not imported with qkv."""
    if name not in ("LatentCache", "StaticLatentCache"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    _check_version()
    from qkv.integrations.transformers import _latent_cache

    return getattr(_latent_cache, name)


@contextmanager
def trials() -> Iterator[None]:
    """Where tensors have numbers: models may be made on meta or under FakeTensorMode, and there be
    given their attention."""
    with outside(), torch.device("cpu"):
        yield


def _check_version() -> None:
    """Raises ImportError, with the version that is installed, where there is none to work with."""
    found = version_of("transformers")
    if not found or _numbers(found) < _numbers(TRIED[0]):
        absent = "it is not installed: pip install 'qkv[transformers]'"
        what = f"transformers {found} is installed" if found else absent
        needs = f"qkv.integrations.transformers needs transformers {TRIED[0]} or newer"
        raise ImportError(f"{needs}, but {what}")


def _numbers(of_version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in of_version.split(".")[:2])
