"""What a case's call has to return, by qkv.testing: in blocks, without the memory that all scores
would take."""

import torch

from qkv.options import MASKS
from qkv.testing import Place, attention

SEQUENCES = ("query", "key", "value", "grad_output")
NO_OPTIONS = ("cu_seq_q", "seqlen_k")  # of a call on documents, or on a cache
BLOCK_ELEMENTS = 1 << 22  # of a block of scores in float64: 32 MiB


def answers(case, dtype=torch.float64, seed=None):
    """{"output", "grad_query", "grad_key", ...}: what case's call returns, and the gradients of all
    leaves; if the case has tangents, also what Call.derivatives() returns. All are computed in
    `dtype`, the blocks' added up in float64. seed: of dropout."""
    inputs = {
        name: x.detach().to(dtype) if isinstance(x, torch.Tensor) and x.is_floating_point() else x
        for name, x in case.inputs.items()
        if name not in NO_OPTIONS
    }
    inputs["grad_output"] = case.grad_output.to(dtype)
    tangents = {name: x.to(dtype) for name, x in case.tangents.items()}
    sums = {
        name: torch.zeros_like(inputs[of], dtype=torch.float64)
        for name, of in results(case.leaves, tangents).items()
    }
    for first_item, part in parts(case):
        for rows, keys, place in blocks(
            case, first_item, part(inputs["query"]), part(inputs["key"])
        ):

            def view(name, x, part=part, rows=rows, keys=keys):
                has_items = name in SEQUENCES or (name in MASKS and x.dim() == 4 and len(x) > 1)
                return cut(name, part(x) if has_items else x, rows, keys)

            own = {name: view(name, x) for name, x in inputs.items()}
            grad_output = own.pop("grad_output")
            leaves = {name: own[name] for name in case.leaves}

            def function(*x, own=own, leaves=leaves, place=place):
                moved = own | dict(zip(leaves, x, strict=True))
                return attention(**moved, dropout_seed=seed, dtype=dtype, place=place)

            directions = {name: view(name, x) for name, x in tangents.items()}
            found = derived(function, leaves, grad_output, directions)
            for name, of in results(leaves, tangents).items():
                view(of, sums[name]).add_(found[name])
    return {name: x.to(dtype) for name, x in sums.items()}


def results(leaves, tangents):
    """{result: the tensor that it has the shape of}"""
    names = {"output": "grad_output"} | {f"grad_{name}": name for name in leaves}
    if tangents:
        names |= {"tangent": "grad_output", "second_grad_output": "grad_output"}
        names |= {f"second_{name}": name for name in leaves}
    return names


def derived(function, leaves, grad_output, tangents):
    """The results() of function(*leaves)."""
    leaves = {name: x.detach().requires_grad_() for name, x in leaves.items()}
    output = function(*leaves.values())
    found = {"output": output.detach()}
    if not leaves:
        return found
    grad_output = grad_output.detach().requires_grad_(bool(tangents))
    grads = torch.autograd.grad(
        output, [*leaves.values()], grad_output, create_graph=bool(tangents)
    )
    found |= {f"grad_{name}": x.detach() for name, x in zip(leaves, grads, strict=True)}
    if not tangents:
        return found
    sources = leaves | {"grad_output": grad_output}
    seconds = torch.autograd.grad(grads, [*sources.values()], [*tangents.values()])
    found |= {f"second_{name}": x for name, x in zip(sources, seconds, strict=True)}
    at = tuple(x.detach() for x in leaves.values())
    found["tangent"] = torch.func.jvp(function, at, tuple(tangents.values()))[1]
    return found


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


def blocks(case, first_item, query, key):
    """(slice of the queries, slice of the keys, Place): few queries at a time, and the keys that a
    window lets them see."""
    L, S = query.size(-2), key.size(-2)
    left, right = case.inputs.get("window_size") or (-1, -1)
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
