"""What hides pairs and what is added to the scores, as the one mask of ONNX's `Attention`."""

from typing import Any

import numpy as np
from onnxscript import ir

from qkv.integrations.onnx._tensors import Size, Tensor, as_shape, broadcast, constant, ints, op


class Places:
    """The numbers of the queries, `[L, 1]`, and of the keys, `[S]`, and what follows from them."""

    def __init__(self, L: Size, S: Size):
        self.sizes = (L, S)
        counts = [op.Squeeze(as_shape((n,)), ints(0)) for n in (L, S)]
        zero, one = op.Constant(value_int=0), op.Constant(value_int=1)
        query, self.key = (op.Range(zero, count, one) for count in counts)
        self.query = op.Unsqueeze(query, ints(1))
        self.extra = op.Sub(counts[1], counts[0])

    def causal(self) -> Tensor:
        """Bool, True where a key is seen."""
        return Tensor(op.LessOrEqual(self.key, self.query), self.sizes)

    def after_query(self) -> ir.Value:
        """j - (i + S - L): how far behind a query a key is, the last of both at the same place."""
        return op.Sub(self.key, op.Add(self.query, self.extra))

    def window(self, left: int | ir.Value, right: int | ir.Value) -> list[Tensor]:
        """Bool, True where a key is seen."""
        seen = []
        for side, bound in ((op.Neg, left), (op.Identity, right)):
            if isinstance(bound, int) and bound < 0:
                continue
            most = op.Constant(value_int=bound) if isinstance(bound, int) else bound
            value = op.LessOrEqual(side(self.after_query()), most)
            if isinstance(bound, ir.Value):  # which may be -1 when the model runs
                value = op.Or(value, op.Less(bound, op.Constant(value_int=0)))
            seen.append(Tensor(value, self.sizes))
        return seen

    def alibi(self, slopes: Tensor, dtype: ir.DataType) -> Tensor:
        """What is added to the scores. slopes: `[..., H, 1, 1]`."""
        distance = op.Cast(op.Abs(self.after_query()), to=dtype)
        value = op.Neg(op.Mul(slopes.value, distance))
        return Tensor(value, broadcast(slopes.sizes, self.sizes))


class Mask:
    """`[L, S]`, or that with some of `[N, H]` before it. Bool, True where a key is seen; or
    floating and added to the scores, where -inf hides."""

    def __init__(self, seen: list[Tensor], added: list[Tensor], dtype: ir.DataType, *sizes: Size):
        """Of one or more masks. dtype: of those that are added. sizes: L and S, along which
        `Attention` broadcasts nothing."""
        self.dtype, self.added = dtype, bool(added)
        masks = added or seen
        tensor, add = masks[0], op.Add if added else op.And
        for mask in masks[1:]:
            tensor = Tensor(add(tensor.value, mask.value), broadcast(tensor.sizes, mask.sizes))
        for mask in seen if added else ():
            tensor = self._hidden(tensor, mask)
        self.tensor = tensor.expanded(*sizes)

    def _hidden(self, tensor: Tensor, seen: Tensor) -> Tensor:
        value = op.Where(seen.value, tensor.value, constant(float("-inf"), self.dtype))
        return Tensor(value, broadcast(tensor.sizes, seen.sizes))

    def above_least(self) -> "Mask":
        """With no number below the second least that is finite. What -inf hides stays hidden."""
        numbers = ir.DataType(self.dtype).numpy()
        least = float(np.nextafter(np.finfo(numbers).min, numbers.type(0)))
        value = self.tensor.value
        finite = op.Max(value, constant(least, self.dtype))
        value = op.Where(op.IsInf(value, detect_positive=0), value, finite)
        self.tensor = Tensor(value, self.tensor.sizes)
        return self

    def with_sinks(self, sinks: Tensor) -> "Mask":
        """With a column for the sinks, `[..., H, 1, 1]`, behind those of the keys."""
        tensor = self.tensor
        if not self.added:
            tensor = self._hidden(Tensor(constant(0.0, self.dtype), ()), tensor)
        tensor = tensor.expanded(*sinks.sizes)
        column = sinks.expanded(*tensor.sizes[:-1], 1)
        value = op.Concat(tensor.value, column.value, axis=-1)
        last: Any = "S + 1"  # no size is equal to it
        self.tensor, self.added = Tensor(value, (*tensor.sizes[:-1], last)), True
        return self

    def sees(self) -> ir.Value:
        """Bool `[..., L, 1]`: whether a query has anything to attend to."""
        value, last = self.tensor.value, ints(-1)
        if self.added:
            highest = op.ReduceMax(value, last, keepdims=1)
            return op.Not(op.IsInf(highest, detect_positive=0))
        seen = op.ReduceMax(op.Cast(value, to=ir.DataType.INT32), last, keepdims=1)
        return op.Cast(seen, to=ir.DataType.BOOL)

    def on(self, scores: ir.Value) -> ir.Value:
        if self.added:
            return op.Add(scores, self.tensor.value)
        return self._hidden(Tensor(scores, ()), self.tensor).value
