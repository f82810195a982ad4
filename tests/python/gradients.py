"""Gradients of attention by autograd, by the names of what they belong to."""

import torch

INPUTS = ("query", "key", "value")
LEAVES = (*INPUTS, "attn_mask", "bias", "alibi_slopes", "sinks")


def is_float(x):
    return isinstance(x, torch.Tensor) and x.is_floating_point()


def leaves_of(options):
    """The names of all arguments that may require grad."""
    return INPUTS + tuple(name for name in LEAVES[3:] if is_float(options.get(name)))


def gradients(f, inputs, options, grads, wanted=INPUTS):
    """{name: d <results of f, grads> / d name}. A result whose entry in grads is None is left
    out."""
    arguments = dict(zip(INPUTS, inputs, strict=True)) | options
    leaves = {name: arguments[name].detach().requires_grad_() for name in wanted}
    results = f(**{**arguments, **leaves})
    used = [(y, g) for y, g in zip(results, grads, strict=True) if g is not None]
    pairs = [(y, g) for y, g in used if y.requires_grad]
    if not pairs:
        return {name: torch.zeros_like(x) for name, x in leaves.items()}
    outputs, seeds = zip(*pairs, strict=True)
    found = torch.autograd.grad(outputs, leaves.values(), seeds, allow_unused=True)
    return {
        name: torch.zeros_like(x) if g is None else g
        for (name, x), g in zip(leaves.items(), found, strict=True)
    }


def reference_gradients(f, inputs, options, grads, wanted=INPUTS):
    """The gradients of the reference f, in f64 throughout."""
    widen = lambda x: x.double() if is_float(x) else x  # noqa: E731
    options = {name: widen(x) for name, x in options.items()}
    return gradients(f, map(widen, inputs), options, [*map(widen, grads)], wanted)
