"""No time is taken of a wrong answer."""

import math

import torch

from .textbook import attention_f64, batches

TENSORS = ("output", "grad_query", "grad_key", "grad_value")
# The error that is always allowed, relative to the largest element.
ROUNDING = {torch.float32: 1e-6, torch.float64: 1e-12}


class WrongAnswer(Exception):
    pass


def check(case):
    """Compares output and gradients of both calls with attention in float64.

    Returns {tensor name: {"error", "torch_error", "limit"}}, all absolute. Raises WrongAnswer
    where our largest error exceeds twice torch's plus rounding, or is NaN.
    """
    names = ("qkv", "torch")
    outputs = {name: case.forward[name]() for name in names}
    expect_like(case.shape, "output", outputs["qkv"], outputs["torch"])
    answers = {name: (outputs[name], *case.backward[name]()) for name in names}
    for tensor, answer, like in zip(TENSORS[1:], answers["qkv"][1:], case.inputs, strict=True):
        expect_like(case.shape, tensor, answer, like)
    tensors = (*case.inputs, case.grad_output)
    errors = {tensor: {"error": 0.0, "torch_error": 0.0, "limit": 0.0} for tensor in TENSORS}
    largest = dict.fromkeys(TENSORS, 0.0)
    for items in batches(case.shape):
        truth = attention_f64(*(t[items].detach() for t in tensors), case.shape.is_causal)
        for i, tensor in enumerate(TENSORS):
            error = errors[tensor]
            for name, source in zip(("error", "torch_error"), names, strict=True):
                error[name] = worse(error[name], distance(answers[source][i][items], truth[i]))
            largest[tensor] = worse(largest[tensor], truth[i].abs().max().item())
    for tensor, error in errors.items():
        rounding = ROUNDING[case.grad_output.dtype] * largest[tensor]
        error["limit"] = 2 * error["torch_error"] + rounding
        if not error["error"] <= error["limit"]:
            raise WrongAnswer(
                f"{case.shape.name} ({case.shape}): {tensor} is off by {error['error']:.1e} from "
                f"float64, at most {error['limit']:.1e} is accepted (torch is off by "
                f"{error['torch_error']:.1e})"
            )
    return errors


def expect_like(shape, tensor, answer, like):
    if answer.shape != like.shape or answer.dtype != like.dtype:
        raise WrongAnswer(
            f"{shape.name} ({shape}): {tensor} is {answer.dtype} {list(answer.shape)}, "
            f"expected {like.dtype} {list(like.shape)}"
        )


def distance(answer, truth):
    return (answer - truth).abs().max().item()


def worse(a, b):
    """The larger, NaN counting as largest."""
    return b if math.isnan(b) or b > a else a
