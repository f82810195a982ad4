"""One call of attention, as nodes of an ONNX graph.

Whatever the rank of query, key and value, they become `[N, H, L, D]`, with all leading dimensions
but the heads in N. ONNX's `Attention` then computes what it can be relied on for. Where runtimes
differ, or refuse, other nodes stand around it or in its place; docs/cpp.md says which for each
argument. Besides, onnxruntime refuses a mask that is broadcast along L or S and a scale of 0 or
less, and has no `Attention` for bfloat16 on CPUs.
"""

from typing import Any

from onnxscript import ir

from qkv.integrations.onnx._masks import Mask, Places
from qkv.integrations.onnx._tensors import Size, Tensor, as_shape, broadcast, constant, ints, op
from qkv.options import PAIRS

TRANSLATED_BY_HEAD = ("alibi_slopes", "sinks")  # of options.BY_HEAD
_FLOAT32, _FLOAT64 = ir.DataType.FLOAT, ir.DataType.DOUBLE
_HALVES = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
# The values of qk_matmul_output_mode, which says what Attention's fourth output is.
_SCORES, _WEIGHTS = 2, 3


class Attention:
    """arguments: those of `qkv.attention` by name, tensors of the graph, numbers or None; and
    `reduce`, if weights are wanted. results: "output", "logsumexp", "weights", or some of them."""

    def __init__(self, arguments: dict[str, Any], results: list[str]):
        self.arguments, self.wanted = arguments, results
        self.given_type = arguments["query"].dtype
        self.window = arguments["window_size"] or (-1, -1)
        self.has_window = any(isinstance(x, ir.Value) or x >= 0 for x in self.window)
        given = any(arguments[name] is not None for name in (*PAIRS, *TRANSLATED_BY_HEAD))
        # Whether the call hides or adds anything.
        self.masked = given or arguments["is_causal"] or self.has_window
        self.dtype = _FLOAT32 if self.given_type in _HALVES else self.given_type
        self._take_inputs()
        self.is_causal, self.mask = self._take_mask()
        self._take_sinks()
        self._take_scale()

    def results(self) -> list[ir.Value]:
        """What is wanted, as qkv's operators return it. Nodes for what nobody uses are taken out by
        the exporter, together with outputs of `Attention`."""
        output, scores, weights = self._composed() if self._composes() else self._fused()
        self.sees = self.mask.sees() if self.mask else None
        results = {
            "output": lambda: self._returned(self._or(0.0, output)),
            "logsumexp": lambda: self._restored(self._lse(scores)),
            "weights": lambda: self._returned(self._reduced(self._or(0.0, weights))),
        }
        return [results[name]() for name in self.wanted]

    def _or(self, nothing: float, value: ir.Value) -> ir.Value:
        """`value`, with `nothing` in the rows of queries that have nothing to attend to."""
        if self.sees is None:
            return value
        return op.Where(self.sees, value, constant(nothing, self.dtype))

    def _lse(self, scores: ir.Value) -> ir.Value:
        lse = op.ReduceLogSumExp(scores, ints(-1), keepdims=1)
        return op.Squeeze(self._or(float("-inf"), lse), ints(-1))

    def _composes(self) -> bool:
        """Whether ONNX's `Attention` is not used."""
        return self.arguments["softcap"] > 0 and (self.masked or self.dtype == _FLOAT64)

    def _take_inputs(self) -> None:
        """query `[N, H, L, D]`; key and value with as many heads, or both with fewer."""
        inputs = [Tensor.given(self.arguments[name]) for name in ("query", "key", "value")]
        self.rank = max(len(x.sizes) for x in inputs)
        inputs = [x.cast(self.dtype).padded(max(self.rank, 4)) for x in inputs]
        self.leading = broadcast(*(x.sizes[:-3] for x in inputs))
        query, key, value = (
            x.expanded(*self.leading, 1, 1, 1).merged(self.leading) for x in inputs
        )
        heads = (query,) if self.arguments["enable_gqa"] else (query, key, value)
        (H,) = broadcast(*((x.sizes[1],) for x in heads))
        query = query.expanded(H, 1, 1)
        if self._composes() or key.sizes[1] != value.sizes[1]:
            key, value = _for_each_head(key, H), _for_each_head(value, H)
        self.query, self.key, self.value = query, key, value

    def _take_mask(self) -> tuple[bool, Mask | None]:
        """What `Attention` is told: is_causal, or a mask of all that hides and adds."""
        L, S = self.query.sizes[2], self.key.sizes[2]
        if not self.masked:
            return False, None
        seen, added = self._given_masks()
        slopes, sinks = self._of_heads("alibi_slopes"), self._of_heads("sinks")
        causal, adds = self.arguments["is_causal"], bool(added)
        others = seen or added or slopes or sinks or self._composes() or self.has_window
        if causal and L == S and not others:
            return True, None
        if causal or slopes or self.has_window:
            places = Places(L, S)
            seen += places.window(*self.window)
            if causal:
                seen.append(places.causal())
            if slopes:
                added.append(places.alibi(slopes, self.dtype))
        if not (seen or added):  # sinks alone
            added.append(Tensor(constant(0.0, self.dtype), ()))
        mask = Mask(seen, added, self.dtype, L, S)
        if adds and not self._composes():
            mask = mask.above_least()
        return False, mask.with_sinks(sinks) if sinks else mask

    def _given_masks(self) -> tuple[list[Tensor], list[Tensor]]:
        seen, added = [], []
        for name in PAIRS:
            value = self.arguments[name]
            if value is not None and value.dtype == ir.DataType.BOOL:
                seen.append(Tensor.given(value).merged(self.leading))
            elif value is not None:
                added.append(Tensor.given(value).cast(self.dtype).merged(self.leading))
        return seen, added

    def _of_heads(self, name: str) -> Tensor | None:
        """An argument `[..., H]`, as `[..., H, 1, 1]`."""
        if self.arguments[name] is None:
            return None
        given = Tensor.given(self.arguments[name]).cast(self.dtype)
        value = op.Unsqueeze(given.value, ints(-2, -1))
        return Tensor(value, (*given.sizes, 1, 1)).merged(self.leading)

    def _take_sinks(self) -> None:
        if self.arguments["sinks"] is not None:
            pads = ints(0, 0, 0, 0, 0, 0, 1, 0)
            padded = (Tensor(op.Pad(x.value, pads), x.sizes) for x in (self.key, self.value))
            self.key, self.value = padded

    def _take_scale(self) -> None:
        self.scale = self.arguments["scale"]
        if self.dtype == _FLOAT64 or self.scale is not None and self.scale <= 0:
            query = op.Mul(self.query.value, self._scale_factor())
            self.query, self.scale = Tensor(query, self.query.sizes), 1.0

    def _fused(self) -> tuple[ir.Value, ir.Value, ir.Value]:
        """`Attention` has one output for both scores and weights, so that it takes two nodes where
        both are used."""
        if "weights" in self.wanted:
            output, weights = self._attention(_WEIGHTS)
            return output, self._attention(_SCORES)[1], weights
        output, scores = self._attention(_SCORES if "logsumexp" in self.wanted else None)
        return output, scores, scores

    def _attention(self, mode: int | None) -> tuple[ir.Value, ir.Value]:
        output, _, _, scores_or_weights = op.Attention(
            self.query.value,
            self.key.value,
            self.value.value,
            self.mask.tensor.value if self.mask else None,
            is_causal=int(self.is_causal),
            scale=self.scale,
            softcap=self.arguments["softcap"],
            qk_matmul_output_mode=mode,
        )
        return output, scores_or_weights

    def _composed(self) -> tuple[ir.Value, ir.Value, ir.Value]:
        softcap = constant(self.arguments["softcap"], self.dtype)
        key = op.Transpose(self.key.value, perm=[0, 1, 3, 2])
        scores = op.Mul(op.MatMul(self.query.value, key), self._scale_factor())
        scores = op.Mul(op.Tanh(op.Div(scores, softcap)), softcap)
        scores = self.mask.on(scores) if self.mask else scores
        weights = op.Softmax(scores, axis=-1)
        return op.MatMul(weights, self.value.value), scores, weights

    def _scale_factor(self) -> ir.Value:
        if self.scale is not None:
            return constant(self.scale, self.dtype)
        head_dim = op.Cast(as_shape(self.query.sizes[-1:]), to=self.dtype)
        return op.Reciprocal(op.Sqrt(head_dim))

    def _reduced(self, weights: ir.Value) -> ir.Value:
        if self.arguments["sinks"] is not None:
            weights = op.Slice(weights, ints(0), ints(-1), ints(-1))
        reduce = self.arguments["reduce"]
        if reduce == "queries":
            return op.ReduceSum(weights, ints(-2), keepdims=0)
        if reduce == "heads" and self.rank > 2:
            return op.ReduceMean(weights, ints(1), keepdims=0)
        return weights

    def _returned(self, value: ir.Value) -> ir.Value:
        value = self._restored(value)
        return value if self.dtype == self.given_type else op.Cast(value, to=self.given_type)

    def _restored(self, value: ir.Value) -> ir.Value:
        """`[N, ...]` with the leading dimensions that query, key and value have."""
        if self.rank < 4:
            return op.Squeeze(value, ints(*range(4 - self.rank)))
        if self.rank > 4:
            shape = op.Concat(as_shape(self.leading), op.Shape(value, start=1), axis=0)
            return op.Reshape(value, shape)
        return value


def _for_each_head(x: Tensor, H: Size) -> Tensor:
    """key or value with a head for every head of query."""
    N, heads, *last = x.sizes
    if heads in (1, H):
        return x.expanded(H, 1, 1)
    if not (isinstance(heads, int) and isinstance(H, int)):
        raise NotImplementedError(
            "qkv.attention to ONNX: the number of heads of query, key and value has to be known "
            "when the model is exported, if key and value have different ones or softcap is not 0"
        )
    apart = Tensor(op.Unsqueeze(x.value, ints(2)), (N, heads, 1, *last))
    return apart.expanded(H // heads, 1, 1).reshaped(N, H, *last)
