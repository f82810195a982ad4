"""Which weights dropout keeps, once more and in torch's operators: docs/options.md, "Dropout"."""

import math

import torch
from torch import Tensor

from qkv.testing._arguments import check_dropout
from qkv.testing._scores import Place

# Philox4x32-7, by Salmon, Moraes, Dror and Shaw ("Parallel random numbers: as easy as 1, 2, 3"):
# in each round, words 0 and 2 are multiplied by these, and these are added to the key.
MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
WEYL = 0x9E3779B9, 0xBB67AE85
ROUNDS = 7
WORD = 0xFFFFFFFF


def philox(counter: tuple[Tensor, ...], key: tuple[int, int]) -> tuple[Tensor, ...]:
    """The four words, int64 tensors of 32 bits, that Philox4x32-7 makes of a counter, four int64
    tensors of 32 bits that broadcast, and a key, two ints of 32 bits."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        first, second = MULTIPLIERS[0] * c0, MULTIPLIERS[1] * c2  # 64 bits, whatever the sign
        c0, c1 = (second >> 32 & WORD) ^ c1 ^ k0, second & WORD
        c2, c3 = (first >> 32 & WORD) ^ c3 ^ k1, first & WORD
        k0, k1 = k0 + WEYL[0] & WORD, k1 + WEYL[1] & WORD
    return c0, c1, c2, c3


def dropout_seed() -> int:
    """Draws from torch's default CPU generator what the next call of qkv with dropout would draw.

    Put the generator back, by torch.manual_seed or torch.set_rng_state, before the call itself:

        >>> state = torch.get_rng_state()
        >>> seed = qkv.testing.dropout_seed()
        >>> torch.set_rng_state(state)
        >>> output = qkv.attention(query, key, value, dropout_p=0.1)
        >>> truth = qkv.testing.attention(query, key, value, dropout_p=0.1, dropout_seed=seed)
    """
    return int(torch.empty(1, dtype=torch.int64).random_(-(2**63), None))


def dropout_mask(
    seed: int | Tensor,
    dropout_p: float,
    shape: tuple[int, ...],
    *,
    place: Place | None = None,
    device: torch.device | str | None = None,
) -> Tensor:
    """Which weights a call of qkv with this seed keeps: bool, True where one is kept.

    Args:
        seed: any 64 bits, as a number or a tensor of one: what `dropout_seed` draws.
        dropout_p: the probability of dropping a weight, 0 to 1.
        shape: `[..., H, L, S]` of the weights, after broadcasting; of one head, `[L, S]`.
        place: where the weights lie in a larger problem.

    Raises:
        ValueError: dropout_p is no probability, or shape has fewer than two dimensions.
    """
    check_dropout(dropout_p, seed)
    if len(shape) < 2:
        raise ValueError(f"shape is {[*shape]}, but [..., H, L, S] is expected")
    *lead, L, S = shape
    place, seed = place or Place(), int(seed)
    i, _ = place.positions(L, S, device)
    plane = torch.arange(math.prod(lead), device=device) + place.first_item * (lead or [1])[-1]
    plane = plane[:, None, None]
    # One counter for eight neighbouring keys: four take a word, and four the same words rotated.
    eights = torch.arange(place.first_key // 8, (place.first_key + S + 7) // 8, device=device)
    counter = (eights, i, plane & WORD, plane >> 32)
    words = torch.stack(torch.broadcast_tensors(*philox(counter, (seed & WORD, seed >> 32 & WORD))))
    words = torch.cat([words, words >> 16 | words << 16 & WORD])
    words = words.movedim(0, -1).flatten(-2)[..., place.first_key % 8 :][..., :S]
    return (words >= min(round(dropout_p * 2**32), WORD)).view(*lead, L, S)


def dropped(
    weights: Tensor, dropout_p: float, seed: int | Tensor | None, place: Place | None
) -> Tensor:
    """What dropout leaves of weights `[..., H, L, S]`."""
    check_dropout(dropout_p, seed)
    if dropout_p == 0 or seed is None:
        return weights
    kept = dropout_mask(seed, dropout_p, weights.shape, place=place, device=weights.device)
    return weights * kept * (1 / (1 - dropout_p) if dropout_p < 1 else 0)
