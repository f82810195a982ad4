"""The projections of qkv's layers."""

import torch
import torch.nn.functional as F
from torch import Tensor

_linear = torch.ops.qkv._linear.default
_product = torch.ops.qkv._product.default
_PLAIN = {Tensor, torch.nn.Parameter, type(None)}
_AT_IMPORT = torch.ops.qkv._projections()


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`torch.nn.functional.linear`, by whoever is fastest on this CPU: torch's libraries, MKL or
    oneDNN, or for few rows the kernels of this library. x is `[..., K]`, weight `[N, K]`, bias
    `[N]`.

    What is compiled decides when it runs. What is exported, traced or a subclass of Tensor stays
    torch's."""
    if is_plain(x, weight, bias) and not torch._C._is_tracing():
        return _linear(x, weight, bias)
    is_compiled = torch.compiler.is_compiling() and not torch.compiler.is_exporting()
    if is_compiled and _AT_IMPORT != "torch" and {type(x), type(weight), type(bias)} <= _PLAIN:
        return _product(x, weight, bias)
    return F.linear(x, weight, bias)


def is_plain(*tensors: Tensor | None) -> bool:
    """Whether operators that are made of others can have these tensors: none of them is of a
    subclass, and nobody compiles, who would see them and not what they are made of."""
    return {*map(type, tensors)} <= _PLAIN and not torch.compiler.is_compiling()


def projections() -> str:
    """Who multiplies in `linear` beside F.linear: "oneDNN", "qkv", or both with " and " between
    them, on CPUs where they were measured to be faster; "torch" elsewhere. For the `repr` of
    layers."""
    # torch.vmap of a layer asks for its repr, and Dynamo has no operators that return a string.
    return _AT_IMPORT if torch.compiler.is_compiling() else torch.ops.qkv._projections()


class Linear(torch.nn.Linear):
    """`torch.nn.Linear` that multiplies by `linear`."""

    def forward(self, input: Tensor) -> Tensor:
        # Something else may have kept this method of a ConvertedLinear that is torch's again.
        product = linear if isinstance(self, Linear) else F.linear
        return product(input, self.weight, self.bias)

    def extra_repr(self) -> str:
        found = projections()
        return super().extra_repr() + (f", projections={found}" if found != "torch" else "")


class ConvertedLinear(Linear):
    """What `qkv.convert(model, linear=True)` makes of `torch.nn.Linear`."""
