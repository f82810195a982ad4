"""GPT-2's linear layer."""

from torch import Tensor
from transformers.pytorch_utils import Conv1D

from qkv.nn._linear import linear


class ConvertedConv1D(Conv1D):
    """What `qkv.convert(model, linear=True)` makes of it. Its weight is `[K, N]`."""

    def forward(self, x: Tensor) -> Tensor:
        # Something else may have kept this method of a layer that is transformers' again.
        is_ours = isinstance(self, ConvertedConv1D)
        return linear(x, self.weight.t(), self.bias) if is_ours else Conv1D.forward(self, x)
