"""Which weights dropout keeps, once more and in torch: see csrc/common/philox.h."""

import torch

MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
WEYL = 0x9E3779B9, 0xBB67AE85
ROUNDS = 10
WORD = 0xFFFFFFFF


def philox(counter, key):
    """Philox4x32-10. counter: four int64 tensors that broadcast, key: two ints, all of 32 bits.
    Returns four int64 tensors of 32 bits."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        first, second = MULTIPLIERS[0] * c0, MULTIPLIERS[1] * c2  # 64 bits, whatever the sign
        c0, c1 = (second >> 32 & WORD) ^ c1 ^ k0, second & WORD
        c2, c3 = (first >> 32 & WORD) ^ c3 ^ k1, first & WORD
        k0, k1 = k0 + WEYL[0] & WORD, k1 + WEYL[1] & WORD
    return c0, c1, c2, c3


def kept(seed, dropout_p, planes, queries, keys):
    """Bool [len(planes), len(queries), len(keys)] for three ranges; planes count query heads
    through the batch: batch * H + head."""
    planes, queries = (torch.arange(r.start, r.stop) for r in (planes, queries))
    fours = torch.arange(keys.start // 4, (keys.stop + 3) // 4)
    plane = planes[:, None, None]
    counter = (fours, queries[:, None], plane & WORD, plane >> 32)
    words = torch.stack(torch.broadcast_tensors(*philox(counter, (seed & WORD, seed >> 32 & WORD))))
    words = words.movedim(0, -1).flatten(-2)[..., keys.start % 4 :][..., : len(keys)]
    return words >= min(round(dropout_p * 2**32), WORD)
