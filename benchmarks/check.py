"""No time is taken of a wrong answer."""

import torch

from qkv.testing import dropout_seed, max_error
from qkv.testing._tolerance import rounding

from . import truth

# The rounding that is always allowed is so many times larger in gradients that are few numbers,
# each a sum over all queries, of both signs: by how much torch misses them is too much a matter of
# luck.
SUMS = {"alibi_slopes": 10, "sinks": 10}
# An error this much larger is none of rounding: torch's way computes something else. Also where
# the truth is 0, as a gradient may be. In half precision torch rounds what it adds to, too.
SOMETHING_ELSE = {
    torch.float32: 1e-3,
    torch.float64: 1e-9,
    torch.bfloat16: 0.25,
    torch.float16: 0.03,
}
SMALL = 0.01


class WrongAnswer(Exception):
    pass


def check(case):
    """Compares output and derivatives of all calls, and of the base's, with attention in float64.

    Returns {tensor name: {"error", "torch_error", "limit"}}, all absolute; torch_error is the
    largest of torch's ways, or that of qkv.testing in the case's dtype where torch has none
    or drops other weights. Raises WrongAnswer where our largest error exceeds twice torch's plus
    rounding, or is NaN; and where one of torch's ways does not compute the same at all.
    """
    if case.base:
        check(case.base)
    drops = case.inputs.get("dropout_p")
    torch.manual_seed(0)  # as Call.output() and Call.derivatives() do
    seed = dropout_seed() if drops else None
    truths = truth.answers(case, seed=seed)
    call = case.calls["qkv"]
    ours = {"output": call.output()}
    expect_like(case, "output", ours["output"], case.grad_output)
    ours |= call.derivatives()
    for name in case.leaves:
        expect_like(case, f"grad_{name}", ours[f"grad_{name}"], case.inputs[name])
    if case.ways and not drops:
        torchs = {way: {"output": c.output()} | c.derivatives() for way, c in case.ways.items()}
    else:
        torchs = {"qkv.testing": truth.answers(case, case.dtype, seed)}
    return {
        tensor: compare(case, tensor, ours[tensor], torchs, expected)
        for tensor, expected in truths.items()
    }


def compare(case, tensor, ours, torchs, expected):
    size = expected.abs().max().item()
    torch_error = 0.0
    for way, answer in torchs.items():
        if tensor not in answer:  # a way that has no backward pass
            continue
        error = max_error(answer[tensor], expected)
        if not error <= SOMETHING_ELSE[ours.dtype] * max(SMALL, size):
            raise WrongAnswer(
                f"{where(case)}: torch's {tensor} ({way}) is off by {error:.1e} from float64, "
                f"where the largest element is {size:.1e}"
            )
        torch_error = max(torch_error, error)
    error = max_error(ours, expected)
    summed = SUMS.get(tensor.partition("_")[2], 1)
    limit = 2 * torch_error + summed * rounding(expected, ours.dtype)
    if not error <= limit:
        raise WrongAnswer(
            f"{where(case)}: {tensor} is off by {error:.1e} from float64, at most {limit:.1e} is "
            f"accepted (torch is off by {torch_error:.1e})"
        )
    return {"error": error, "torch_error": torch_error, "limit": limit}


def expect_like(case, tensor, answer, like):
    if answer.shape != like.shape or answer.dtype != like.dtype:
        raise WrongAnswer(
            f"{where(case)}: {tensor} is {answer.dtype} {list(answer.shape)}, "
            f"expected {like.dtype} {list(like.shape)}"
        )


def where(case):
    return f"{case.entry.name} ({case.entry})"
