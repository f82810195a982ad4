"""The projections of qkv's layers."""

import torch
import torch.nn.functional as F
from torch import Tensor

_linear = torch.ops.qkv._linear.default
_PLAIN = {Tensor, torch.nn.Parameter, type(None)}


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`torch.nn.functional.linear`, by whichever of torch's two libraries is faster for float32 on
    this CPU: MKL, or oneDNN (`projections`). x is `[..., K]`, weight `[N, K]`, bias `[N]`.

    What is compiled, traced or a subclass of Tensor stays torch's."""
    if is_plain(x, weight, bias) and not torch._C._is_tracing():
        return _linear(x, weight, bias)
    return F.linear(x, weight, bias)


def is_plain(*tensors: Tensor | None) -> bool:
    """Whether operators that are made of others can have these tensors: none of them is of a
    subclass, and nobody compiles, who would see them and not what they are made of."""
    return {*map(type, tensors)} <= _PLAIN and not torch.compiler.is_compiling()


def projections() -> str:
    """Who multiplies in `linear`: "oneDNN" on CPUs where that was measured to be faster, "torch",
    which is F.linear, elsewhere. For the `repr` of layers."""
    return torch.ops.qkv._projections()


class Linear(torch.nn.Linear):
    """`torch.nn.Linear` that multiplies by `linear`."""

    def forward(self, input: Tensor) -> Tensor:
        return linear(input, self.weight, self.bias)

    def extra_repr(self) -> str:
        found = projections()
        return super().extra_repr() + (f", projections={found}" if found != "torch" else "")


class ConvertedLinear(Linear):
    """What `qkv.convert(model, linear=True)` makes of `torch.nn.Linear`."""

    def forward(self, input: Tensor) -> Tensor:
        # Something else may have kept this method of a layer that is torch's again.
        product = linear if isinstance(self, ConvertedLinear) else F.linear
        return product(input, self.weight, self.bias)
