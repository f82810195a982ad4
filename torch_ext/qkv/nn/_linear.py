"""The one function by which the layers multiply with their projections."""

import torch
import torch.nn.functional as F
from torch import Tensor


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`x @ weight.T + bias`."""
    return F.linear(x, weight, bias)


class Linear(torch.nn.Linear):
    """`torch.nn.Linear` that multiplies by `linear`."""

    def forward(self, input: Tensor) -> Tensor:
        return linear(input, self.weight, self.bias)
