"""Gaussian smoothing: attention that looks at positions, and at nothing else."""

import contextlib
import math
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from qkv._refuse import refuse
from qkv.nn._attend import attend

_refuse = partial(refuse, error=RuntimeError, function="GaussianSmoothing")

# All neighbours further away than this many sigma have 2.3e-19 of the weight together, erfc(9 /
# sqrt(2)), which is lost in the rounding of float64, 1.1e-16.
_RADIUS_IN_SIGMA = 9.0
_FARTHEST = 2.0**62  # a radius in positions: an int64, whatever sigma is


class GaussianSmoothing(torch.nn.Module):
    """The average of neighbouring values, by a bell curve of their distance:
    `weight_ij = exp(-|x_i - x_j|^2 / (2 sigma^2))`, divided by its sum over j.

    This is attention whose queries and keys are the positions x: the exponent is a dot product,
    `(x_i . x_j - |x_j|^2 / 2) / sigma^2`, but for a term that all keys of a query share and that
    the softmax takes out again. Statistics knows it as the Nadaraya-Watson estimator.

    Args:
        sigma: the width of the bell curve, in the unit of the positions.
        trainable: whether `sigma` is a parameter. What is stored is `log_sigma`, so that the width
            stays positive.
        device: of `log_sigma`, which is float64.

    Everything is computed in float64 and rounded once. Positions that are far from each other,
    measured in sigma, lose digits in the dot product: weights are right to some
    `1e-16 * (extent / sigma)^2`, relative.

    Raises:
        ValueError: a sigma that is not positive and finite.

    Example:
        >>> smooth = qkv.nn.GaussianSmoothing(sigma=1.0)
        >>> smooth(torch.tensor([[0.], [0.], [1.], [0.], [0.]])).flatten()
        tensor([0.0772, 0.2571, 0.4026, 0.2571, 0.0772])

    Source: Nadaraya, "On estimating regression", 1964; Watson, "Smooth regression analysis", 1964.
    """

    def __init__(self, sigma: float, trainable: bool = False, device: Any = None) -> None:
        super().__init__()
        if not 0 < sigma < math.inf:
            _refuse("sigma", sigma, "a positive number is expected", error=ValueError)
        log_sigma = torch.tensor(math.log(sigma), dtype=torch.float64, device=device)
        kind = torch.nn.Parameter if trainable else torch.nn.Buffer
        self.log_sigma = kind(log_sigma)

    @property
    def sigma(self) -> Tensor:
        """The width of the bell curve: float64, `[]`."""
        return self.log_sigma.double().exp()

    def extra_repr(self) -> str:
        return "" if self.log_sigma.is_meta else f"sigma={self.sigma.item():g}"

    def forward(
        self,
        value: Tensor,
        position: Tensor | None = None,
        query_position: Tensor | None = None,
        attn_mask: Tensor | None = None,
        need_weights: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Smooths values along their positions.

        Args:
            value: `[..., S, Dv]`, floating: the last dimension but one is smoothed.
            position: `[..., S, P]`, where each value is, in P dimensions; the leading dimensions
                broadcast with value's. None: at 0, 1, 2 and so on. Then nothing beyond 9 sigma is
                seen, so that the cost is S times 18 sigma, and otherwise L times S; within longer
                gaps of attn_mask the result is 0, where with a position the nearest value counts.
            query_position: `[..., L, P]`, where the result is wanted. None: at `position`.
            attn_mask: broadcastable to `[..., L, S]`, bool: False = the value is missing.
            need_weights: also return the weights.

        Returns:
            `[..., L, Dv]`, of value's dtype; with need_weights also the weights, `[..., L, S]`,
            float64. Where nothing may be seen they are 0. Both are differentiable with respect to
            values, positions and sigma.

        Raises:
            RuntimeError: shapes and dtypes that do not fit, by the argument's name.
        """
        regular = position is None and query_position is None
        position, query_position = self._positions(value, position, query_position)
        # Only differences matter, and numbers near 0 lose fewest digits.
        centre = position.detach().mean(-2, keepdim=True) if position.numel() else 0.0
        key, query = position - centre, query_position - centre
        key = torch.cat((key, key.square().sum(-1, keepdim=True) / -2), -1)
        query = F.pad(query, (0, 1), value=1.0) / self.sigma.square()
        options: dict[str, Any] = {"scale": 1.0, "attn_mask": attn_mask}
        # A trace keeps the number, whatever sigma is learnt later.
        is_traced = not torch.compiler.is_compiling() and torch._C._is_tracing()
        if regular and not (is_traced and self.log_sigma.requires_grad):
            # A tensor's ceil, and not math's, for which torch.export has no name in its files.
            radius = (_RADIUS_IN_SIGMA * self.sigma).ceil().clamp(max=_FARTHEST).long()
            # On the meta device, under FakeTensorMode and where vmap has many of them, there is no
            # number. The window saves time alone.
            with contextlib.suppress(RuntimeError):
                options["window_size"] = (radius.item(),) * 2
        output, weights = attend((query, key, value.double()), need_weights, False, options)
        output = output.to(value.dtype)
        return output if weights is None else (output, weights)

    def _positions(
        self, value: Tensor, position: Tensor | None, query_position: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """(position, query_position), float64."""
        if value.dim() < 2 or not value.is_floating_point():
            wanted = "a floating tensor of 2 dimensions or more, [..., S, Dv], is expected"
            _refuse("value", f"{value.dtype} {[*value.shape]}", wanted)
        if position is None:
            position = torch.arange(value.size(-2), device=value.device).unsqueeze(-1)
        if position.dim() < 2 or position.size(-2) != value.size(-2):
            wanted = f"[..., {value.size(-2)}, P], a place for each of the values, is expected"
            _refuse("position", position, f"{wanted}: value is {[*value.shape]}")
        if query_position is None:
            query_position = position
        if query_position.dim() < 2 or query_position.size(-1) != position.size(-1):
            wanted = f"[..., L, {position.size(-1)}], as many dimensions as position has,"
            _refuse("query_position", query_position, f"{wanted} is expected")
        return position.double(), query_position.double()
