"""No time is taken of a model that computes something else."""

import math

import torch

from ..check import SOMETHING_ELSE, WrongAnswer

# So many roundings of the dtype, relative to all logits or all gradients, are always allowed. Some
# losses are so steep at random weights that rounding moves all gradients at once, and luck decides
# by how much: those of a T5 of two layers, in bfloat16, by 1 to 9 % with torch's attention and with
# ours. Float32 tells a wrong model from that.
ROUNDINGS = 4
# And so many in a model with ReLUs whose linear layers are multiplied in another order, which turns
# one that stands at 0: gradients of T5-small moved by 2e-4.
ROUNDINGS_OF_LINEAR = 4096


def answers(model, kind, step):
    """{name: tensor}: the logits, and of a step of training the gradients as well. Dropout is off,
    in eval mode, so that there is one right answer."""
    assert not model.training
    found = {"logits": step().logits.detach()}
    if kind == "training":
        found |= {name: x.grad for name, x in model.named_parameters() if x.grad is not None}
    return found


def check(where, ours, torchs, truth, dtype, roundings=ROUNDINGS):
    """Compares answers(), tensor by tensor. truth: those in float64, but for what a model computes
    in float32 whatever its dtype.

    Returns {"error", "torch_error"}: the norms of all differences, as parts of the truth's. Raises
    WrongAnswer where one of our errors exceeds twice torch's by more than so many roundings, and
    where one of torch's is no rounding.
    """
    expect_same_names(where, ours, truth)
    size = {key: norm(group(truth, key)) for key in (True, False)}
    errors = {
        way: {name: norm({name: x.double() - truth[name]}) for name, x in found.items()}
        for way, found in (("error", ours), ("torch_error", torchs))
    }
    for name, error in errors["error"].items():
        whole = size[name == "logits"]
        torch_error = errors["torch_error"][name]
        limit = 2 * torch_error + roundings * torch.finfo(dtype).eps * whole
        if not torch_error <= SOMETHING_ELSE[dtype] * whole:
            raise WrongAnswer(f"{where}: torch's {name} is off by {torch_error / whole:.1e}")
        if not error <= limit:
            raise WrongAnswer(
                f"{where}: {name} is off by {error / whole:.1e} from float64, at most "
                f"{limit / whole:.1e} is accepted (torch is off by {torch_error / whole:.1e})"
            )
    whole = math.hypot(*size.values())
    return {way: math.hypot(*found.values()) / whole for way, found in errors.items()}


def expect_same_names(where, ours, truth):
    if other := sorted(ours.keys() ^ truth.keys()):
        raise WrongAnswer(f"{where}: {', '.join(other)} in one of the models alone")


def group(tensors, are_logits):
    return {name: x for name, x in tensors.items() if (name == "logits") == are_logits}


def norm(tensors):
    return math.hypot(*(x.double().norm().item() for x in tensors.values()))
