"""What the tests of forward mode share: sizes, tangents by torch.func.jvp, and what must hold of a
function against its reference. A function takes {argument: tensor} and options."""

import torch

from qkv import testing


def sizes_of(B, H, L, S, D, DV):
    """{argument: its size} of all that have a gradient."""
    return {
        "query": (B, H, L, D),
        "key": (B, H, S, D),
        "value": (B, H, S, DV),
        "attn_mask": (L, S),
        "bias": (1, H, 1, S),
        "alibi_slopes": (H,),
        "sinks": (B, H),
    }


def grouped(L, S, D, DV):
    """Inputs with grouped heads, whose batches broadcast, and a tangent of each."""
    inputs = {
        "query": torch.randn(3, 1, 8, L, D).double(),
        "key": torch.randn(2, 2, S, D).double(),
        "value": torch.randn(3, 1, 4, S, DV).double(),
    }
    return inputs, {name: torch.randn_like(x) for name, x in inputs.items()}


def seeded(dropout_p=0.0, **options):
    """Options of a reference that drops what the function does after the same manual_seed."""
    torch.manual_seed(1)
    if dropout_p:
        options |= {"dropout_p": dropout_p, "dropout_seed": testing.dropout_seed()}
    return options


def jvp(function, inputs, tangents, **options):
    """(results, their tangents); only the inputs that `tangents` names have one."""
    moving = tuple(tangents)

    def f(*x):
        return function(inputs | dict(zip(moving, x, strict=True)), **options)

    return torch.func.jvp(f, tuple(inputs[name] for name in moving), tuple(tangents.values()))


def check_tangents(function, reference, inputs, tangents, options):
    """Results and tangents, also of each input that moves alone."""
    found = jvp(function, inputs, tangents, **options)
    torch.testing.assert_close(found, jvp(reference, inputs, tangents, **options))
    torch.testing.assert_close(found[0], function(inputs, **options))
    for name in inputs:
        alone = {name: tangents[name]}
        found = jvp(function, inputs, alone, **options)
        torch.testing.assert_close(found, jvp(reference, inputs, alone, **options))


def gradcheck(function, inputs, options):
    """In forward mode, too."""
    inputs = {name: x.requires_grad_() for name, x in inputs.items()}
    return torch.autograd.gradcheck(
        lambda *x: function(dict(zip(inputs, x, strict=True)), **options),
        tuple(inputs.values()),
        check_forward_ad=True,
        check_batched_grad=False,
        check_undefined_grad=False,
        fast_mode=True,
    )
