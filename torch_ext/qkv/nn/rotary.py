"""Rotary positions: the angles by which pairs of a head's features turn."""

from functools import partial

import torch
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

from qkv._refuse import refuse
from qkv._watched import is_recorded

_refuse = partial(refuse, function="Rotary")

# A table of so many positions is made with the layer: 1 MiB for 128 features. A longer sequence
# makes a longer one.
_POSITIONS = 2048


class Rotary(torch.nn.Module):
    """Rotary positions: at position p, pair i of a head's features turns by `p * frequency_i`.

    Args:
        dim: R, how many features of a head turn, its first: even, at most the head's width.
        base: `frequency_i = base ** (-2 i / R)`, for i from 0 to R / 2 - 1.
        interleaved: a pair are the neighbours `x[2 i]` and `x[2 i + 1]`. False: `x[i]` and
            `x[i + R / 2]`, as transformers has the weights of Llama, Qwen and Gemma.
        frequencies: `[R / 2]`, instead of those of base: Llama 3's, YaRN's, or what else is scaled.
        scale: cos and sin are multiplied by it: YaRN's attention factor.

    It has no parameters, and nothing in a state dict. Angles are computed in float64 and their cos
    and sin rounded once, whatever the layer's dtype. The layers of a model best share one, and so
    its table.

    Raises:
        ValueError: a dim that is not even and positive, or a base that is not; frequencies of
            another shape.

    Example:
        >>> rotary = qkv.nn.Rotary(64, base=500_000.0)
        >>> cos, sin = rotary(torch.arange(10))
        >>> cos.shape
        torch.Size([10, 32])

    Source: Su et al., "RoFormer: Enhanced transformer with rotary position embedding", 2021.
    """

    def __init__(
        self,
        dim: int,
        base: float = 10_000.0,
        *,
        interleaved: bool = False,
        frequencies: Tensor | None = None,
        scale: float = 1.0,
    ) -> None:
        super().__init__()
        if not isinstance(dim, int) or dim < 2 or dim % 2:
            _refuse("dim", dim, "an even number from 2 on is expected")
        if not isinstance(base, (int, float)) or isinstance(base, bool) or not base > 0:
            _refuse("base", base, "a positive number is expected")
        self._about = f"base={base:g}" if frequencies is None else "by frequencies"
        if frequencies is None:
            exponents = torch.arange(0, dim, 2, dtype=torch.float64, device="cpu") / dim
            frequencies = base**-exponents
        elif frequencies.shape != (dim // 2,):
            _refuse("frequencies", frequencies, f"[{dim // 2}], one for each pair, is expected")
        self.dim, self.interleaved, self.scale = dim, interleaved, scale
        with torch.inference_mode(False):  # a layer that is trained later may take them
            # No buffers: those would be rounded with the layer's parameters.
            self._frequencies = frequencies.detach().to(torch.float64, copy=True)
            self._table = self._rows(torch.arange(_POSITIONS, device="cpu"), torch.float32)

    def extra_repr(self) -> str:
        return f"{self.dim}, {self._about}, interleaved={self.interleaved}, scale={self.scale:g}"

    def forward(
        self, positions: Tensor, dtype: torch.dtype = torch.float32
    ) -> tuple[Tensor, Tensor]:
        """cos and sin, `[..., R / 2]` of dtype, of integer positions `[...]`."""
        cos, sin = self._rows(positions, dtype).unbind(-2)
        return cos, sin

    def table(self, end: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """cos and sin of the positions 0 to `end - 1` or further, `[end or more, 2, R / 2]`."""
        is_there = end <= self._table.size(0)
        if is_recorded():  # for all lengths, and so not for those of a table alone
            from torch.fx.experimental.symbolic_shapes import statically_known_true

            is_there = torch.compiler.is_exporting() and statically_known_true(is_there)
        if dtype == torch.float32 and is_there:
            return self._table
        if dtype != torch.float32 or torch.compiler.is_compiling() or is_recorded():
            # What is traced is not to be kept.
            return self._rows(torch.arange(end, device="cpu"), dtype)
        # Any later call may take the table, whatever the one that needs it is in.
        with torch.inference_mode(False), temporarily_clear_interpreter_stack():
            positions = torch.arange(max(end, 2 * self._table.size(0)), device="cpu")
            rows = self._rows(positions, dtype)
        if type(rows) is type(self._table):  # and has numbers, not as under FakeTensorMode
            self._table = rows
        return rows

    def _rows(self, positions: Tensor, dtype: torch.dtype) -> Tensor:
        angles = positions.unsqueeze(-1) * self._frequencies.to(positions.device)
        return (torch.stack((angles.cos(), angles.sin()), -2) * self.scale).to(dtype)
