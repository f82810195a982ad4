"""Linear functions whose transpose is known, with every derivative: what moves numbers between
ranks is one."""

from collections.abc import Callable

from torch import Tensor
from torch.autograd import Function

Linear = Callable[[Tensor], Tensor]


def linear(function: Linear, transposed: Linear, tensor: Tensor) -> Tensor:
    """function(tensor), whose gradient is transposed(that of the result)."""
    return _Apply.apply(tensor, function, transposed)


class _Apply(Function):
    @staticmethod
    def forward(tensor: Tensor, function: Linear, transposed: Linear) -> Tensor:
        return function(tensor)

    @staticmethod
    def setup_context(ctx, inputs, output):
        _, ctx.function, ctx.transposed = inputs

    @staticmethod
    def backward(ctx, *grads):
        return linear(ctx.transposed, ctx.function, *grads), None, None

    @staticmethod
    def jvp(ctx, *tangents):
        return linear(ctx.function, ctx.transposed, tangents[0])
