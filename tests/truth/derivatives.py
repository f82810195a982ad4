"""Results and derivatives of a call, by names, whatever computes it."""

import warnings

import torch

with warnings.catch_warnings():  # torch warns when it loads this for its first jvp
    warnings.simplefilter("ignore")
    from torch._decomp import decompositions_for_jvp  # noqa: F401


def zeros_for(gradients, like):
    return [torch.zeros_like(x) if g is None else g for g, x in zip(gradients, like, strict=True)]


def grad(outputs, inputs, seeds, create_graph=False):
    """Vector-Jacobian products; zeros where nothing is connected."""
    pairs = [(y, s) for y, s in zip(outputs, seeds, strict=True) if y.requires_grad]
    if not pairs:
        return [torch.zeros_like(x) for x in inputs]
    outputs, seeds = zip(*pairs, strict=True)
    found = torch.autograd.grad(
        outputs, inputs, seeds, create_graph=create_graph, allow_unused=True
    )
    return zeros_for(found, inputs)


def derivatives(f, leaves, cotangents, directions, order):
    """{name: tensor} of the results and, by `order`, of their derivatives.

    f: takes leaves by name, returns a dict of results. cotangents: of some results, by name.
    directions: of leaves. order 1: "grad x", the gradients. order 2: besides "second x", the
    gradients, with respect to leaves and cotangents, of the gradients in these directions.
    Those with respect to a cotangent are the tangent of its result, too (linearity)."""
    with torch.set_grad_enabled(order > 0):
        inputs = {n: x.detach().requires_grad_(order > 0) for n, x in leaves.items()}
        results = f(inputs)
    found = {n: x.detach() for n, x in results.items()}
    if not order or not inputs:
        return found
    seeds = {n: x.detach().requires_grad_(order > 1) for n, x in cotangents.items()}
    outputs = [results[n] for n in seeds]
    gradients = grad(outputs, [*inputs.values()], [*seeds.values()], create_graph=order > 1)
    found |= {f"grad {n}": g.detach() for n, g in zip(inputs, gradients, strict=True)}
    if order > 1:
        everything = inputs | {f"grad_{n}": x for n, x in seeds.items()}
        second = grad(gradients, [*everything.values()], [directions[n] for n in inputs])
        found |= {f"second {n}": g for n, g in zip(everything, second, strict=True)}
    return found


def forward_mode(f, leaves, names, directions):
    """{"tangent y": tensor} of the results `names` by torch.func.jvp."""

    def only_names(*tensors):
        results = f(dict(zip(leaves, tensors, strict=True)))
        return tuple(results[n] for n in names)

    # torch makes no dual numbers of tensors that repeat an element.
    repeats = [any(s == 0 and n > 1 for n, s in zip(x.shape, x.stride(), strict=True))
               for x in leaves.values()]  # fmt: skip
    primals = tuple(
        x.detach().clone(memory_format=torch.contiguous_format) if again else x.detach()
        for x, again in zip(leaves.values(), repeats, strict=True)
    )
    tangents = tuple(directions[n] for n in leaves)
    _, found = torch.func.jvp(only_names, primals, tangents)
    return {f"tangent {n}": x.detach() for n, x in zip(names, found, strict=True)}
