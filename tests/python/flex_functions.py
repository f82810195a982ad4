"""What the functions of torch's own test, test/inductor/test_flex_attention.py, do, said anew:
`SCORE_MODS` and `MASK_MODS`, by name. Each makes its function; a score_mod comes with the tensors
that may be learned. LEFT_OUT: what is not among them, and why."""

import functools
import math

import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import and_masks, or_masks

B, H, L, S = 2, 4, 24, 32
INF = float("inf")


def numbers(*sizes, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed + 7 * len(sizes))
    return torch.randn(sizes, generator=generator, dtype=torch.float64).to(dtype)


def integers(high, *sizes):
    return torch.randint(0, high, sizes, generator=torch.Generator().manual_seed(high))


def causal(s, b, h, q, k):
    return torch.where(q >= k, s, -INF)


def relative(s, b, h, q, k):
    return s + (q - k)


def _alibi():
    return lambda s, b, h, q, k: s + (k - q) * torch.exp2(-((h + 1) * 8.0 / H)), []


def _table(*sizes, at, factor=False):
    """Adds what a table has at a place, or multiplies by it."""

    def make():
        table = numbers(*sizes)
        if factor:
            return lambda s, b, h, q, k: s * table[at(b, h, q, k)], [table]
        return lambda s, b, h, q, k: s + table[at(b, h, q, k)], [table]

    return make


def _every_dimension():
    of_query, of_batch, of_head = numbers(L), numbers(B), numbers(H)

    def score_mod(s, b, h, q, k):
        s = s + of_query[q]
        s = s + of_batch[b]
        return s + of_head[h]

    return score_mod, [of_query, of_batch, of_head]


def _chained(*sizes, chain, at):
    """Looks up in what was looked up. torch.vmap has no gradient of that: `by_one_index` is the
    same for it."""

    def make():
        table = numbers(*sizes)

        def score_mod(s, b, h, q, k):
            return s + chain(table, b, h, q, k)

        score_mod.by_one_index = lambda s, b, h, q, k: s + table[at(b, h, q, k)]
        return score_mod, [table]

    return make


_WHICH = torch.tensor(3)


def _jagged():
    """Causal within each document, by positions in it."""
    begins = torch.tensor([0, 10, 17, S], dtype=torch.int32)
    ids = torch.repeat_interleave(torch.arange(3), begins.diff()).int()

    def within(of):
        def score_mod(s, b, h, q, k):
            return of(s, b, h, q - begins[ids[q]], k - begins[ids[k]])

        return score_mod

    return within(causal), []


def _documents():
    ids = torch.arange(S).int() // 10
    return lambda s, b, h, q, k: torch.where((q >= k) & (ids[q] == ids[k]), s, -INF), []


def _halves():
    is_second = torch.arange(S) >= S // 2
    return lambda s, b, h, q, k: torch.where(is_second[q] == is_second[k], s, -INF), []


def _seen_from_both_sides():
    most = integers(L, B).int()

    def score_mod(s, b, h, q, k):
        return torch.where(((q <= most[b]) & (k <= most[b])) | (q >= k), s, -INF)

    return score_mod, []


def _neighbours_2d():
    width = 8

    def place(x):
        return x / width, x % width

    def score_mod(s, b, h, q, k):
        (x, y), (u, v) = place(q), place(k)
        return torch.where(((x - u).abs() <= 2) | ((y - v).abs() <= 2), s, -INF)

    return score_mod, []


def _bounded_by_length():
    lengths = torch.arange(B).int() + 1

    def below(of):
        return lambda s, b, h, q, k: torch.where(s <= lengths[b], of(s, b, h, q, k), -INF)

    return below(causal), []


def _of_one_number():
    number = torch.ones((), dtype=torch.int32) * 3
    return lambda s, b, h, q, k: s + number, []


def _branch_of_the_closure(adds):
    def make():
        number = torch.ones((), dtype=torch.int32) * 2

        def score_mod(s, b, h, q, k):
            if adds:
                return s + number
            return s * number

        return score_mod, []

    return make


def _sum_of_shape():
    sizes = torch.zeros(B, 3).shape
    return lambda s, b, h, q, k: s + sizes[0], []


def _new_zeros():
    table = torch.ones(B, 1, L, S, dtype=torch.bool).tril()
    return lambda s, b, h, q, k: s + table[b, h.new_zeros(h.shape), q, k], []


def _decomposed_positions():
    width = 8
    rows = numbers(B, H, L, math.ceil(S / width))
    return lambda s, b, h, q, k: s + rows[b, h, q, k // width], [rows]


def _doubled():
    table = numbers(B, L, S, H)

    def score_mod(s, b, h, q, k):
        return s + bias[b, h, q, k]

    bias = (2 * table).view(B, H, L, S).contiguous()
    return score_mod, [bias]


def _in_half_precision():
    of_query, of_key = (numbers(n, dtype=torch.bfloat16) for n in (L, S))
    return lambda s, b, h, q, k: s + of_query[q] + of_key[k], [of_query, of_key]


def _gate():
    gate = numbers(H)
    return lambda s, b, h, q, k: s * torch.sigmoid(gate[h].to(torch.float64)), [gate]


def _by_offset():
    table, offset = numbers(S), integers(S, L)
    return lambda s, b, h, q, k: s + table[offset[q]], [table]


def _on_both_sides(is_same):
    def make():
        first = numbers(S)
        second = first if is_same else numbers(S, seed=1)
        learned = [first] if is_same else [first, second]
        return lambda s, b, h, q, k: s + first[q] + second[k], learned

    return make


def _of_one_storage():
    first, second = numbers(2, S)
    return lambda s, b, h, q, k: s + first[q] + second[k], []


def _changed_in_place(s, b, h, q, k):
    s *= 2
    return s


def _distance_in_space():
    places, lengths = numbers(S, 3), torch.logspace(0.001, 0.1, H, dtype=torch.float64)

    def score_mod(s, b, h, q, k):
        distance = (places[q] - places[k]).pow(2).sum(-1) + 0.1
        return s * torch.exp(-distance.sqrt() / lengths[h])

    def by_one_index(s, b, h, q, k):
        distance = sum((places[q, n] - places[k, n]) ** 2 for n in range(3)) + 0.1
        return s * torch.exp(-distance.sqrt() / lengths[h])

    score_mod.by_one_index = by_one_index
    return score_mod, [places, lengths]


def _sum_of_a_row():
    table = numbers(B, 8)

    def score_mod(s, b, h, q, k):
        return s + table[b].sum(dim=-1)

    score_mod.by_one_index = lambda s, b, h, q, k: s + sum(table[b, n] for n in range(8))
    return score_mod, [table]


def _composed():
    return lambda s, b, h, q, k: torch.where(q <= k, relative(s, b, h, q, k), -INF), []


def _plain(function):
    return lambda: (function, [])


SCORE_MODS = {
    "identity": _plain(lambda s, b, h, q, k: s),
    "changed in place": _plain(_changed_in_place),
    "times two": _plain(lambda s, b, h, q, k: s * 2),
    "squared": _plain(lambda s, b, h, q, k: s * s),
    "causal": _plain(causal),
    "inverse causal": _plain(lambda s, b, h, q, k: torch.where(q <= k, s, -INF)),
    "relative": _plain(relative),
    "relative causal": _plain(lambda s, b, h, q, k: torch.where(q >= k, s + (q - k), -INF)),
    "alibi": _alibi,
    "head factor": _table(H, at=lambda b, h, q, k: h, factor=True),
    "trigonometry": _plain(lambda s, b, h, q, k: torch.sin(torch.cos(s)) + torch.tan(b)),
    "branching": _plain(lambda s, b, h, q, k: torch.cos(s) * torch.sin(s) + torch.tan(b)),
    "documents": _documents,
    "index of an index": _chained(
        B, L, chain=lambda t, b, h, q, k: t[b][q], at=lambda b, h, q, k: (b, q)
    ),
    "a number, then indices": _chained(
        4, B, H, L, chain=lambda t, b, h, q, k: t[2][b, h][q], at=lambda b, h, q, k: (2, b, h, q)
    ),
    "captured index": _chained(
        B,
        H,
        4,
        L,
        chain=lambda t, b, h, q, k: t[b][h][_WHICH, q],
        at=lambda b, h, q, k: (b, h, _WHICH, q),
    ),
    "even keys": _plain(lambda s, b, h, q, k: torch.where(k % 2 == 0, s, -INF)),
    "composition": _composed,
    "every dimension": _every_dimension,
    "halves by booleans": _halves,
    "bias of query and key": _table(L, S, at=lambda b, h, q, k: (q, k)),
    "bias of batch, query and key": _table(B, L, S, at=lambda b, h, q, k: (b, q, k)),
    "bias of all": _table(B, H, L, S, at=lambda b, h, q, k: (b, h, q, k)),
    "bias of head, key and query": _table(H, S, L, at=lambda b, h, q, k: (h, k, q)),
    "rows of positions": _decomposed_positions,
    "relative bias": _table(2 * S, at=lambda b, h, q, k: (q - k) + S),
    "bias of the sum": _table(L + S, at=lambda b, h, q, k: q + k),
    "bias of the distance": _table(2 * S, at=lambda b, h, q, k: torch.abs(q - k)),
    "causal or both sides": _seen_from_both_sides,
    "neighbours in 2-D": _neighbours_2d,
    "floor division": _plain(lambda s, b, h, q, k: s - q // (1 + k)),
    "silu": _plain(lambda s, b, h, q, k: F.silu(s)),
    "bounded, causal": _bounded_by_length,
    "captured number": _of_one_number,
    "branch that adds": _branch_of_the_closure(True),
    "branch that multiplies": _branch_of_the_closure(False),
    "a size in the closure": _sum_of_shape,
    "jagged": _jagged,
    "new zeros as an index": _new_zeros,
    "bias of head": _table(H, at=lambda b, h, q, k: h),
    "query and key swapped": _table(S, L, at=lambda b, h, q, k: (k, q)),
    "one index after another": _chained(
        L, S, chain=lambda t, b, h, q, k: t[q][k], at=lambda b, h, q, k: (q, k)
    ),
    "computed bias": _doubled,
    "half precision": _in_half_precision,
    "query factor": _table(L, at=lambda b, h, q, k: q, factor=True),
    "batch and head": _table(B, H, at=lambda b, h, q, k: (b, h)),
    "clamped window": _table(17, at=lambda b, h, q, k: torch.clamp(q - k + 8, 0, 16)),
    "bias of key": _table(S, at=lambda b, h, q, k: k),
    "by an offset": _by_offset,
    "symmetric": _on_both_sides(True),
    "distinct": _on_both_sides(False),
    "one storage": _of_one_storage,
    "gate": _gate,
    "distance in space": _distance_in_space,
    "sum of a row": _sum_of_a_row,
}


def _documents_mask(clamped):
    def make():
        ids = integers(3, B, S).sort().values
        if clamped:
            one = ids[0]
            last = one.shape[0] - 1
            return lambda b, h, q, k: one[q.clamp(0, last)] == one[k.clamp(0, last)]
        return lambda b, h, q, k: ids[b, q] == ids[b, k]

    return make


def _padding():
    lengths = torch.tensor([L, 9])

    def mask_mod(b, h, q, k, input_lengths):
        return (q < input_lengths[b]) & (k < input_lengths[b])

    return functools.partial(mask_mod, input_lengths=lengths)


def _rows_by_booleans():
    hidden = integers(2, B, L).bool()
    return lambda b, h, q, k: ~hidden[b, q]


def _offset_by_batch():
    offset = torch.arange(B).double()
    return lambda b, h, q, k: (q + offset[b] * 4) >= k


def _table_mask():
    seen = torch.ones(B, 1, L, S, dtype=torch.bool).tril()
    return lambda b, h, q, k: seen[b, h.new_zeros(h.shape), q, k]


def _causal_mask(b, h, q, k):
    return q >= k


def _window_mask(b, h, q, k):
    return q - k <= 5


MASK_MODS = {
    "all": lambda: lambda b, h, q, k: torch.ones((), dtype=torch.bool),
    "causal": lambda: _causal_mask,
    "inverse causal": lambda: lambda b, h, q, k: q <= k,
    "sliding window": lambda: lambda b, h, q, k: (q >= k) & (q <= k + 5),
    "causal and window": lambda: and_masks(_causal_mask, _window_mask),
    "all but a window": lambda: lambda b, h, q, k: (q >= k) & (q - k > 5),
    "either side": lambda: or_masks(_causal_mask, lambda b, h, q, k: q < k),
    "nothing": lambda: and_masks(_causal_mask, lambda b, h, q, k: q < k),
    "two ends": lambda: lambda b, h, q, k: (k < 5) | (k >= 20),
    "documents": _documents_mask(False),
    "documents, clamped": _documents_mask(True),
    "padding": _padding,
    "some rows": lambda: lambda b, h, q, k: q < L // 2,
    "rows by booleans": _rows_by_booleans,
    "every second item": lambda: lambda b, h, q, k: (q >= k) & (b % 2 == 0),
    "offset by batch": _offset_by_batch,
    "by a table": _table_mask,
}

LEFT_OUT = {
    "test_cant_lower_error_message": "sums a row of 256 numbers; torch refuses it as well",
    "test_autograd_function_in_score_mod": "torch never runs its function",
    "paged attention": "the functions above, at places in pages: attention_with_kvcache has pages",
    "BACKEND, BLOCK_M, max_autotune, epilogue_fused ...": "about Triton's kernels",
    "other devices": "about CUDA",
}
