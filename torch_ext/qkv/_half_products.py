"""What half precision is multiplied as; the environment variable QKV_HALF_PRODUCTS sets it."""

import torch


def half_products() -> str:
    """What the factors of a matrix product are in bfloat16 and float16: "native" or "float32".

    "native", the default: their own type where the instruction set in use multiplies it (bfloat16
    with "amx" and "avx512bf16"). Weights, and gradients of scores, are then rounded to bfloat16 as
    factors, as torch's own fused kernel rounds them; sums are float32.
    "float32": every factor is widened first, so that nothing but results is rounded. This is slower
    where the CPU multiplies bfloat16, and the same elsewhere.

    docs/accuracy.md, "Half precision", says what either costs in accuracy.

    Raises:
        ValueError: QKV_HALF_PRODUCTS is neither of the two.
    """
    return torch.ops.qkv._half_products()


def set_half_products(name: str) -> None:
    """Use "native" or "float32" from now on, in all threads.

    A forward pass and its backward pass belong under one setting: they add up scores in different
    orders under the two, and the last digits of large scores matter to the gradients.

    Raises:
        ValueError: `name` is neither of the two.
    """
    torch.ops.qkv._set_half_products(name)
