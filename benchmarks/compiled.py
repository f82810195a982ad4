"""What torch.compile makes of attention: of the textbook's, and of FlexAttention."""

import functools

import torch
from torch._functorch import config
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from .by_hand import composed
from .call import Call, Unavailable

NO_DERIVATIVES = "torch.compile does not support double backward"


@functools.cache
def compiler_fails():
    """Why torch.compile does not work here, or "": it needs a C++ compiler."""
    try:
        torch.compile(lambda x: x + 1)(torch.ones(2))
    except RuntimeError as error:  # which torch._dynamo's and Inductor's errors are
        return first_line(error)
    return ""


def first_line(error):
    line, _, _ = str(error).strip().partition("\n")
    return f"{type(error).__name__}: {line}"


def compile_afresh(function):
    """torch.compile of the function for one case. Raises Unavailable where there is no compiler."""
    if why := compiler_fails():
        raise Unavailable(why)
    torch.compiler.reset()  # of other shapes: dynamo keeps few versions of one function
    return torch.compile(function, fullgraph=True, dynamic=False)


def textbook(inputs, grad_output):
    # A backward pass that is timed alone runs many times on one graph, whose buffers it must leave.
    config.donated_buffer = False
    function = compile_afresh(composed)
    refuses = dict.fromkeys(("jvp", "double_backward", "backward_twice"), NO_DERIVATIVES)
    return Call(function, inputs, grad_output, refuses=refuses)


def flex(inputs, grad_output, block_mask=None):
    """FlexAttention, which has a forward pass alone on CPUs. The block mask is of positions, so a
    model makes it once, and it is not timed. block_mask: where the inputs do not say it."""
    compiled = compile_afresh(flex_attention)
    options = {"score_mod": score_of(inputs), "block_mask": block_mask or block_mask_of(inputs)}
    options["enable_gqa"] = inputs["enable_gqa"]

    def function(query, key, value):
        return compiled(query, key, value, **options)

    tensors = {name: inputs[name].detach() for name in ("query", "key", "value")}
    try:
        with torch.no_grad():
            function(**tensors)
    except (RuntimeError, ValueError) as error:  # as of float64, which it does not take
        raise Unavailable(first_line(error)) from None
    others = ("backward", "both", "jvp", "double_backward", "backward_twice")
    return Call(function, tensors, grad_output, refuses=dict.fromkeys(others, flex_refusal()))


@functools.cache
def flex_refusal():
    """What FlexAttention says when it is asked for a backward pass. It must say something: a
    version of torch that has one is to be timed."""
    x = torch.zeros(1, 1, 16, 16, requires_grad=True)
    try:
        flex_attention(x, x, x)
    except NotImplementedError as error:
        return str(error)
    raise RuntimeError("FlexAttention has a backward pass on CPUs now: time it")


def score_of(inputs):
    """FlexAttention's score_mod for softcap or alibi_slopes, or None."""
    softcap, slopes = inputs.get("softcap"), inputs.get("alibi_slopes")
    offset = inputs["key"].size(-2) - inputs["query"].size(-2)
    if softcap:
        return lambda score, b, h, i, j: (score / softcap).tanh() * softcap
    if slopes is not None:
        return lambda score, b, h, i, j: score - slopes[h] * (i + offset - j).abs()
    return None


def block_mask_of(inputs):
    """Of is_causal and window_size, or None: positions as qkv.testing.visible() has them."""
    L, S = inputs["query"].size(-2), inputs["key"].size(-2)
    is_causal, window = inputs["is_causal"], inputs.get("window_size")
    if not is_causal and not window:
        return None
    left, right = (side if side >= 0 else max(L, S) for side in window or (-1, -1))

    def seen(b, h, i, j):
        ahead = j - i - (S - L)
        in_window = (-ahead <= left) & (ahead <= right)
        return in_window & (i >= j) if is_causal else in_window

    return create_block_mask(seen, None, None, L, S, device="cpu")
