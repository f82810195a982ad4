"""Attention without options, as each library computes it."""

import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import qkv

from .call import Call


def attention(**inputs):
    return qkv.attention(**inputs)


def sdpa(inputs, grad_output):
    return Call(F.scaled_dot_product_attention, inputs, grad_output)


def on_math_path(function):
    """function with SDPA as matrix products and a softmax: of its paths on a CPU, the only one that
    torch can derive a second time, or in forward mode."""

    def on_math(**inputs):
        with sdpa_kernel(SDPBackend.MATH):
            return function(**inputs)

    return on_math
