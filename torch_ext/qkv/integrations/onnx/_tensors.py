"""Tensors of the ONNX graph that is being written, with their sizes.

The exporter knows the sizes of what a translation is given and of what it returns, and nothing of
what lies between. A `Tensor` carries them along, so that nothing is broadcast or reshaped in the
exported model that has its shape already.
"""

from dataclasses import dataclass, field
from typing import Any

from onnxscript import ir, opset23

# What its functions are annotated with are tensors of ONNX Script's own programs. Here they are
# called with values of the graph, which the exporter's evaluator takes.
op: Any = opset23


@dataclass(frozen=True)
class Unknown:
    """A size that is known when the model runs: that of `value` along `axis`."""

    name: str  # torch.export's, such as "s27" or "2*s3": of the same name, of the same size
    value: ir.Value = field(compare=False)
    axis: int = field(compare=False)


Size = int | Unknown


def constant(number: float, dtype: ir.DataType) -> ir.Value:
    return op.Constant(value=ir.tensor(number, dtype=dtype))


def ints(*numbers: int) -> ir.Value:
    return op.Constant(value_ints=list(numbers))


def as_shape(sizes: tuple[Size, ...]) -> ir.Value:
    """The sizes as a tensor `[len(sizes)]`, which Expand and Reshape take."""
    parts = [
        ints(size)
        if isinstance(size, int)
        else op.Shape(size.value, start=size.axis, end=size.axis + 1)
        for size in sizes
    ]
    return op.Concat(*parts, axis=0)


def broadcast(*shapes: tuple[Size, ...]) -> tuple[Size, ...]:
    """The shape of what has these shapes, added up. That they fit has been checked before."""
    rank = max(map(len, shapes))
    padded = [(1,) * (rank - len(shape)) + shape for shape in shapes]
    return tuple(
        # A size that is known is preferred to its name.
        min((s for s in sizes if s != 1), key=lambda s: isinstance(s, Unknown), default=1)
        for sizes in zip(*padded, strict=True)
    )


@dataclass(frozen=True)
class Tensor:
    value: ir.Value
    sizes: tuple[Size, ...]

    @classmethod
    def given(cls, value: ir.Value) -> "Tensor":
        """What a translation is called with."""
        shape: Any = value.shape
        sizes = (
            size if isinstance(size, int) else Unknown(str(size.value), value, axis)
            for axis, size in enumerate(shape)
        )
        return cls(value, tuple(sizes))

    def cast(self, dtype: ir.DataType) -> "Tensor":
        if self.value.dtype == dtype:
            return self
        return Tensor(op.Cast(self.value, to=dtype), self.sizes)

    def padded(self, rank: int) -> "Tensor":
        """With dimensions of 1 in front, until there are `rank`."""
        missing = rank - len(self.sizes)
        if missing <= 0:
            return self
        axes = ints(*range(missing))
        return Tensor(op.Unsqueeze(self.value, axes), (1,) * missing + self.sizes)

    def expanded(self, *sizes: Size) -> "Tensor":
        """Broadcast with a tensor of these sizes, which are those of the last dimensions."""
        target = broadcast(self.sizes, sizes)
        if target == self.sizes:
            return self
        return Tensor(op.Expand(self.value, as_shape(sizes)), target)

    def reshaped(self, *sizes: Size) -> "Tensor":
        if sizes == self.sizes:
            return self
        # One size need not be known.
        unknown = [axis for axis, size in enumerate(sizes) if isinstance(size, Unknown)]
        given = [-1 if axis in unknown[:1] else size for axis, size in enumerate(sizes)]
        return Tensor(op.Reshape(self.value, as_shape(tuple(given))), sizes)

    def merged(self, leading: tuple[Size, ...]) -> "Tensor":
        """4-D, where the shape begins with `leading` or broadcasts to that: all of `leading` is
        one dimension then."""
        if len(leading) == 1:
            return self
        full = self.padded(len(leading) + 3)
        if all(size == 1 for size in full.sizes[:-3]):
            return full.reshaped(1, *full.sizes[-3:])
        full = full.expanded(*leading, 1, 1, 1)
        shape = (-1, *full.sizes[-3:])
        value = op.Reshape(full.value, as_shape(shape))
        name = "*".join(size.name if isinstance(size, Unknown) else str(size) for size in leading)
        return Tensor(value, (Unknown(name, value, 0), *full.sizes[-3:]))
