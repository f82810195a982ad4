"""What a case's call has to return, by qkv.testing: in blocks, without the memory that all scores
would take."""

from functools import partial

import torch

from qkv.options import MASKS
from qkv.testing import Place, attention

SEQUENCES = ("query", "key", "value", "grad_output")
BLOCK_ELEMENTS = 1 << 22  # of a block of scores in float64: 32 MiB


def answers(case, dtype=torch.float64, seed=None):
    """{"output", "grad_query", "grad_key", ...}: what case's call returns, and its
    Call.derivatives(). All are computed in `dtype`, the blocks' added up in float64. seed: of
    dropout."""
    sums = {}
    for place, view in blocks(case):
        function = partial(attention, dropout_seed=seed, dtype=dtype, place=place)

        def computed(name, x, view=view):
            x = view(name, x)
            is_number = isinstance(x, torch.Tensor) and x.is_floating_point()
            return x.to(dtype) if is_number else x

        call = case.call(function).mapped(computed)
        for name, x in ({"output": call.output()} | call.derivatives()).items():
            of = name.partition("_")[2]  # the input that it is about, and has the shape of
            of = of if of in case.inputs else "grad_output"
            if name not in sums:
                whole = case.inputs.get(of, case.grad_output)
                sums[name] = torch.zeros_like(whole, dtype=torch.float64)
            view(of, sums[name]).add_(x)
    return {name: x.to(dtype) for name, x in sums.items()}


def blocks(case):
    """(Place, function from an input or a result of that name to the view that the block has of
    it): a few queries at a time, and the keys that a window lets them see."""
    left, right = case.inputs.get("window_size") or (-1, -1)
    for first_item, part in parts(case):
        (items, heads, L, _), S = part(case.inputs["query"]).shape, part(case.inputs["key"]).size(2)
        width = min(S, left + 1 + right) if min(left, right) >= 0 else S
        step = max(1, BLOCK_ELEMENTS // (items * heads * width))
        for start in range(0, L, step):
            end = min(start + step, L)
            first = max(0, start + S - L - left) if left >= 0 else 0
            last = min(S, end + S - L + right) if right >= 0 else S
            rows, keys = slice(start, end), slice(first, last)
            yield Place(start, first, S - L, first_item), partial(cut, part, rows, keys)


def parts(case):
    """(index of the first batch item, function from a tensor to its part [B, H, L, D]): a few batch
    items where they are small, one document of a packed batch."""
    if case.documents:
        for begin, end in case.documents:
            yield 0, lambda x, begin=begin, end=end: x[begin:end].transpose(0, 1)[None]
        return
    shape = case.entry.shape
    item = max(shape.heads * shape.seqlen_q, shape.kv_heads * shape.head_dim) * shape.seqlen_k
    step = max(1, BLOCK_ELEMENTS // item)
    for start in range(0, shape.batch, step):
        yield start, lambda x, start=start: x[start : start + step]


def cut(part, rows, keys, name, x):
    """The view of x that a block needs."""
    if name in SEQUENCES:
        return part(x)[..., keys if name in ("key", "value") else rows, :]
    if name in MASKS:
        x = part(x) if x.dim() == 4 and len(x) > 1 else x
        rows = rows if x.size(-2) > 1 else slice(None)
        return x[..., rows, keys if x.size(-1) > 1 else slice(None)]
    return x
