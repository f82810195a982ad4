"""Additive attention: the scores come from a small network, not from a dot product."""

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor

from qkv._functional import attention
from qkv._refuse import refuse
from qkv._watched import is_recorded
from qkv._weights import attention_with_weights

_refuse = partial(refuse, error=RuntimeError, function="AdditiveAttention")

# How many elements of the `[..., L, S, hidden_dim]` tensor are made at a time, unless one query
# alone has more. 2 ** 20 are 4 MiB in float32. With 512 queries, 512 keys and 256 hidden units on
# one core of a Sapphire Rapids Xeon (2 MiB of L2 cache), where other programs ran, 2 ** 18 and
# 2 ** 20 were the fastest without gradients; 2 ** 22 cost more memory, and 1.2 times the time of
# 2 ** 20.
_BLOCK_ELEMENTS = 2**20


class AdditiveAttention(torch.nn.Module):
    """Attention whose scores a network with one hidden layer computes, as in the first paper on
    attention: `score_ij = v . tanh(W_q query_i + W_k key_j + b)`.

    The output is the average of the values by the softmax of these scores. Query and key need not
    have the same width. The softmax and the average are those of `qkv.attention`, and so is what
    masks, dropout and rows with nothing to attend to mean.

    Args:
        query_dim: Dq, the width of a query.
        key_dim: Dk, the width of a key.
        hidden_dim: the number of hidden units.
        bias: whether there is a `b`.
        dropout: the probability of dropping a weight in training, 0 to 1.
        device, dtype: of the parameters.

    The parameters are `query_proj.weight`, `[hidden_dim, Dq]` (W_q); `query_proj.bias`,
    `[hidden_dim]` (b); `key_proj.weight`, `[hidden_dim, Dk]` (W_k); and `v`, `[hidden_dim]`. All
    start out uniform, as in `torch.nn.Linear`.

    A pair of query and key costs hidden_dim additions, tanh and multiplications, and in training
    the memory of its tanh, `[..., L, S, hidden_dim]` in all. docs/layers.md has both measured.

    NaN or infinity in a key or value that attn_mask hides does not reach the output. From a key
    it reaches the gradient of W_k, so fill padding with numbers for training.

    Raises:
        ValueError: a width that is not positive, or a dropout that is not from 0 to 1.

    Example:
        >>> layer = qkv.nn.AdditiveAttention(query_dim=64, key_dim=48, hidden_dim=32)
        >>> query, key, value = torch.randn(2, 5, 64), torch.randn(2, 7, 48), torch.randn(2, 7, 16)
        >>> output, weights = layer(query, key, value, need_weights=True)
        >>> output.shape, weights.shape
        (torch.Size([2, 5, 16]), torch.Size([2, 5, 7]))

    Paper: Bahdanau et al., "Neural Machine Translation by Jointly Learning to Align and Translate",
    https://arxiv.org/abs/1409.0473
    """

    def __init__(
        self,
        query_dim: int,
        key_dim: int,
        hidden_dim: int,
        bias: bool = False,
        dropout: float = 0.0,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        widths = {"query_dim": query_dim, "key_dim": key_dim, "hidden_dim": hidden_dim}
        for name, width in widths.items():
            if width < 1:
                _refuse(name, width, "1 or more is expected", error=ValueError)
        if not 0 <= dropout <= 1:
            _refuse("dropout", dropout, "0 to 1 is expected", error=ValueError)
        self.dropout = dropout
        like: Any = {"device": device, "dtype": dtype}
        self.query_proj = torch.nn.Linear(query_dim, hidden_dim, bias=bias, **like)
        self.key_proj = torch.nn.Linear(key_dim, hidden_dim, bias=False, **like)
        self.v = torch.nn.Parameter(torch.empty(hidden_dim, **like))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws all parameters anew."""
        self.query_proj.reset_parameters()
        self.key_proj.reset_parameters()
        bound = 1 / math.sqrt(self.v.numel())
        torch.nn.init.uniform_(self.v, -bound, bound)

    def extra_repr(self) -> str:
        return f"dropout={self.dropout}" if self.dropout else ""

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        need_weights: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Scores every key for every query, and averages the values.

        Args:
            query: `[..., L, Dq]`, of the parameters' dtype. The leading dimensions of query, key
                and value broadcast.
            key: `[..., S, Dk]`, of the same dtype.
            value: `[..., S, Dv]`, of the same dtype. In Bahdanau's translator it is the key.
            attn_mask: broadcastable to `[..., L, S]`. Bool: True = may attend, as in
                `qkv.attention` and unlike in `qkv.nn.MultiheadAttention`. Or float32 or the
                parameters' dtype: added to the scores, -inf hides.
            need_weights: also return the weights.

        Returns:
            The output, `[..., L, Dv]`; with need_weights also the weights, `[..., L, S]`, in
            training those after dropout. A query with nothing to attend to gets an output and
            weights of 0. Both are differentiable, twice as well.

        Raises:
            RuntimeError: shapes and dtypes that do not fit, by the argument's name. Nested tensors.
            NotImplementedError: attn_mask or need_weights where query is not on the CPU.
        """
        self._check(query, key, value)
        scores = self._scores(query, key)
        # The operator's own scores are 0, and these a bias on them.
        zero = value.new_zeros(1)
        no_query, no_key = (zero.expand(*scores.shape[:-2], n, 1) for n in scores.shape[-2:])
        dropout_p = self.dropout if self.training else 0.0
        attend = attention_with_weights if need_weights else attention
        return attend(no_query, no_key, value, attn_mask, dropout_p, bias=scores)

    def _scores(self, query: Tensor, key: Tensor) -> Tensor:
        """`[..., L, S]`, some queries at a time."""
        query = self.query_proj(query).unsqueeze(-2)
        key = self.key_proj(key).unsqueeze(-3)
        if is_recorded():  # for all sizes, and not those of so many blocks alone
            return (query + key).tanh() @ self.v
        batch = math.prod(torch.broadcast_shapes(query.shape[:-3], key.shape[:-3]))
        elements = batch * key.size(-2) * key.size(-1)  # of one query, in each batch item
        rows = max(1, _BLOCK_ELEMENTS // max(1, elements))
        blocks = [(some + key).tanh() @ self.v for some in query.split(rows, -3)]
        return blocks[0] if len(blocks) == 1 else torch.cat(blocks, -2)

    def _check(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        inputs = {"query": query, "key": key, "value": value}
        widths = {"query": self.query_proj.in_features, "key": self.key_proj.in_features}
        device = query.device.type
        is_autocast = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
        for name, tensor in inputs.items():
            if tensor.is_nested:
                _refuse(name, "a nested tensor", "a dense one is expected")
            if tensor.dim() < 2:
                _refuse(name, tensor, "2 dimensions or more are expected")
            if tensor.size(-1) != widths.get(name, tensor.size(-1)):
                wanted = f"a last dimension of {widths[name]}, the layer's {name}_dim, is expected"
                _refuse(name, tensor, wanted)
            if tensor.dtype != self.v.dtype and not is_autocast:
                _refuse(name, tensor.dtype, f"{self.v.dtype}, as the parameters are, is expected")
        if key.size(-2) != value.size(-2):
            _refuse("value", value, f"as many keys as in key, {[*key.shape]}, are expected")
        try:
            torch.broadcast_shapes(*(x.shape[:-2] for x in inputs.values()))
        except RuntimeError:
            shapes = ", ".join(f"{name} {list(x.shape)}" for name, x in inputs.items())
            raise RuntimeError(
                f"AdditiveAttention: the leading dimensions of {shapes} do not broadcast"
            ) from None
