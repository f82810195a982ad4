"""A dictionary that has an answer for every query."""

from functools import partial

import torch
from torch import Tensor

from qkv._functional import attention
from qkv._hard import hard_attention
from qkv._refuse import refuse
from qkv._weights import attention_with_weights

_refuse = partial(refuse, function="SoftDictionary")


class SoftDictionary(torch.nn.Module):
    """Keys and values that are kept, and looked up by how well a query fits each key.

    A query gets an average of all values, in which a value weighs the more the better its key fits:
    `output = softmax(scale * query . keys) @ values`. With a large scale the best key has all the
    weight; `hard=True` takes it alone.

    Args:
        keys: `[N, Dk]`, of any dtype that the operator takes.
        values: `[N, Dv]`, of the same dtype.
        scale: multiplies the scores, `1 / sqrt(Dk)` if None. The larger, the harder the choice.
        trainable: whether keys and values are parameters, or else buffers.

    `keys` and `values` are copied. A module has them in its state dict.

    Raises:
        ValueError: keys or values that are not matrices, of as many rows and one dtype.

    Example:
        >>> values = torch.tensor([[10.], [20.], [30.]])
        >>> numbers = qkv.nn.SoftDictionary(torch.eye(3), values, scale=100.0)
        >>> query = torch.tensor([[0., 1., 0.], [1., 1., 0.]])     # a key; between two
        >>> numbers(query).flatten().round()
        tensor([20., 15.])
        >>> numbers(query, hard=True).flatten()            # of two the first
        tensor([20., 10.])

    Papers: Weston et al., "Memory networks", https://arxiv.org/abs/1410.3916; Miller et al.,
    "Key-value memory networks for directly reading documents", https://arxiv.org/abs/1606.03126
    """

    keys: Tensor
    values: Tensor

    def __init__(
        self, keys: Tensor, values: Tensor, scale: float | None = None, trainable: bool = False
    ) -> None:
        super().__init__()
        for name, tensor in (("keys", keys), ("values", values)):
            if tensor.dim() != 2:
                _refuse(name, tensor, "[N, D] is expected")
        if len(keys) != len(values):
            _refuse("values", values, f"a row for each of the {len(keys)} keys is expected")
        if keys.dtype != values.dtype:
            _refuse("values", values.dtype, f"{keys.dtype}, as keys is, is expected")
        self.scale = scale
        kind = torch.nn.Parameter if trainable else torch.nn.Buffer
        self.keys, self.values = (kind(x.detach().clone()) for x in (keys, values))

    def __len__(self) -> int:
        return len(self.keys)

    def extra_repr(self) -> str:
        (entries, key_dim), value_dim = self.keys.shape, self.values.size(1)
        return f"entries={entries}, key_dim={key_dim}, value_dim={value_dim}, scale={self.scale}"

    def forward(
        self, query: Tensor, hard: bool = False, need_weights: bool = False
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Looks queries up.

        Args:
            query: `[..., L, Dk]`, of the keys' dtype.
            hard: take the value of the best key, the first if several are. No gradient reaches
                query and keys then.
            need_weights: also return what each key weighs.

        Returns:
            `[..., L, Dv]`; with need_weights also the weights, `[..., L, N]`, of which with `hard`
            one is 1.

        Raises:
            RuntimeError: a query whose shape or dtype does not fit.
        """
        if query.dim() < 2 or query.size(-1) != self.keys.size(1):
            wanted = f"[..., L, {self.keys.size(1)}], as wide as the keys, is expected"
            _refuse("query", query, wanted, RuntimeError)
        arguments = (query, self.keys, self.values)
        if not hard:
            lookup = attention_with_weights if need_weights else attention
            return lookup(*arguments, scale=self.scale)
        output, index = hard_attention(*arguments, scale=self.scale, return_index=True)
        if not need_weights:
            return output
        entry = torch.arange(len(self), device=index.device)
        return output, (index.unsqueeze(-1) == entry).to(output.dtype)
