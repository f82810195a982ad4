"""Which weights dropout keeps in each sample, by vmap's `randomness`.

A call of an operator has one seed, or n of them: then the batch items, or documents, are cut into n
equal parts, and each part has a seed of its own and is numbered from 0. So samples with a seed each
keep what they would keep in calls of their own, and samples that share one seed, numbered on from
sample to sample, each keep another set.
"""

from typing import Any

import torch
from torch import Tensor

from qkv._vmap.samples import Samples

# A new seed is a multiple of the old one plus the number of the sample, so that the seeds of nested
# vmaps do not meet: the multiplier of Knuth's linear congruential generator.
_MULTIPLIER = 6364136223846793005


def _refuse_randomness() -> None:
    raise RuntimeError(
        "vmap: attention with dropout was called in randomness error mode. Pass randomness='same' "
        "or 'different' to vmap, or dropout_p=0"
    )


def of(samples: Samples, options: dict[str, Any]) -> Tensor | None:
    """[size, n], the seeds of each sample; or [1, 1]: one for all, with the samples numbered on;
    None without dropout."""
    if "dropout_seed" not in samples.values or options["dropout_p"] == 0:
        return None
    seed = samples.each("dropout_seed")
    if samples.is_batched("dropout_seed"):
        return seed
    is_forward = "logsumexp" not in samples.values
    if is_forward and samples.randomness == "error":
        _refuse_randomness()
    # A backward pass alone under vmap must keep what its one forward pass has kept.
    if samples.randomness != "different" or not (is_forward or samples.is_batched("logsumexp")):
        return seed
    if seed.size(1) == 1:
        return seed[:1]
    return seed * _MULTIPLIER + torch.arange(samples.size, device=seed.device)[:, None]


def rule(op: Any, samples: Samples, options: dict[str, Any]):
    """One seed for all samples: see `of` for what becomes of it."""
    if samples.randomness == "error":
        _refuse_randomness()
    return op(samples.values["query"]), None
