"""What a case's call has to return, by qkv.testing: in blocks, without the memory that all scores
would take."""

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
    for first_item, part in parts(case):
        query, key = part(case.inputs["query"]), part(case.inputs["key"])
        window = case.inputs.get("window_size") or (-1, -1)
        for rows, keys, place in blocks(query, key, window, first_item):

            def view(name, x, part=part, rows=rows, keys=keys):
                has_items = name in SEQUENCES or (name in MASKS and x.dim() == 4 and len(x) > 1)
                return cut(name, part(x) if has_items else x, rows, keys)

            def block(name, x, view=view):
                if not isinstance(x, torch.Tensor):
                    return x
                return view(name, x.to(dtype) if x.is_floating_point() else x)

            def function(place=place, **inputs):
                return attention(**inputs, dropout_seed=seed, dtype=dtype, place=place)

            call = case.call(function).mapped(function, block)
            for name, x in ({"output": call.output()} | call.derivatives()).items():
                of = name.partition("_")[2]  # the input whose shape it has, or grad_output
                if name not in sums:
                    whole = case.inputs.get(of, case.grad_output)
                    sums[name] = torch.zeros_like(whole, dtype=torch.float64)
                view(of if of in case.inputs else "grad_output", sums[name]).add_(x)
    return {name: x.to(dtype) for name, x in sums.items()}


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


def blocks(query, key, window, first_item):
    """(slice of the queries, slice of the keys, Place): few queries at a time, and the keys that a
    window lets them see."""
    L, S = query.size(-2), key.size(-2)
    left, right = window
    width = min(S, left + 1 + right) if min(left, right) >= 0 else S
    step = max(1, BLOCK_ELEMENTS // (query.size(0) * query.size(1) * width))
    for start in range(0, L, step):
        end = min(start + step, L)
        first = max(0, start + S - L - left) if left >= 0 else 0
        last = min(S, end + S - L + right) if right >= 0 else S
        yield slice(start, end), slice(first, last), Place(start, first, S - L, first_item)


def cut(name, x, rows, keys):
    """The view of x that a block needs."""
    if name in ("query", "grad_output"):
        return x[..., rows, :]
    if name in ("key", "value"):
        return x[..., keys, :]
    if name in MASKS:
        rows = rows if x.size(-2) > 1 else slice(None)
        return x[..., rows, keys if x.size(-1) > 1 else slice(None)]
    return x
