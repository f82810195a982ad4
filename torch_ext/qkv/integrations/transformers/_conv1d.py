"""GPT-2's linear layer."""

from torch import Tensor
from transformers.pytorch_utils import Conv1D

from qkv.nn._linear import linear


class ConvertedConv1D(Conv1D):
    """What `qkv.convert(model, linear=True)` makes of it. Its weight is `[K, N]`."""

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight.t(), self.bias)
