"""Tensors of a layer that writes its attention out, put off until somebody needs their numbers.

A product in such a layer gives a `Scores`, which looks like the tensor and keeps the functions that
lead to it and, by core.py's rules, what they have come to as attention. A product of weights with
values is then one call of qkv.attention. Any other use of a `Scores` runs the functions as they
are written, so that what is no attention is what it would have been."""

import functools
import sys
import weakref
from typing import Any

import torch
from torch import _C, Tensor
from torch.utils._pytree import tree_map_only

from qkv._conversion.core import Core, as_product, attend, begin, change
from qkv._functional import has_kernels

_STARTS = {torch.matmul, torch.bmm, torch.baddbmm, torch.einsum}
_STARTS |= {getattr(Tensor, x) for x in ("matmul", "__matmul__", "bmm", "baddbmm")}
_PRODUCTS = {"matmul", "bmm", "einsum"}
_IN_PLACE = {"__iadd__": "add", "__isub__": "sub", "__imul__": "mul", "__idiv__": "div"}
_SETTERS = {"__setitem__", "__set__"}  # the second is that of x.data
_VIEWS = {"view", "reshape", "flatten", "unflatten", "unsqueeze", "squeeze"}
_VIEWS |= {"view_as", "reshape_as"}
_LAYOUT = {"dim", "ndim", "numel", "size"}
_LIKE = {"expand_as", "view_as", "reshape_as"}
_DTYPES = {x: getattr(torch, x) for x in ("float", "double", "half", "bfloat16")}
# A product of fewer multiplications stays as it is written, since putting it off costs a layer more
# than qkv's attention gains. On one thread of a busy Zen 4, MPNet's layer (12 heads of 64, float32)
# was 0.84 times as fast with 0.2 million (one row of 16 tokens), and as fast with 13 to 20 million
# (128 to 160 tokens). Weights times values are as many as queries times keys, where values are as
# wide, so that both are left together. 0 has every layer routed.
SMALL = 16_000_000
# How far two ways to compute the same are apart at most, over the largest number in it.
_CLOSE = {torch.float64: 1e-6, torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 5e-2}


def _version(x: Any) -> int | None:
    """Counts how often a tensor was changed in place, where torch counts that."""
    return x._version if isinstance(x, Tensor) and not x.is_inference() else None


class Step:
    """A function of tensors and of other steps that has not been called yet."""

    __slots__ = ("__weakref__", "args", "autocast", "core", "function", "kwargs", "layer", "state",
                 "value", "versions")  # fmt: skip

    def __init__(self, layer: Any, core: Core, function: Any, args: Any, kwargs: Any):
        # What the function goes by, whenever it runs.
        self.state = torch.is_inference_mode_enabled(), torch.is_grad_enabled()
        self.autocast = torch.get_autocast_dtype("cpu"), torch.is_autocast_enabled("cpu")
        if not torch.is_grad_enabled() and core.has_gradient():  # none of what it gives has one
            core = core.without_gradient()
        self.layer, self.core, self.value = layer, core, None
        self.function, self.kwargs = function, kwargs
        self.args = tuple(x.step if type(x) is Scores else x for x in args)
        self.versions = [*map(_version, self.args)]
        layer.steps.append(weakref.ref(self))

    def run(self) -> Tensor:
        """What the layer would have had."""
        if self.value is None:
            self.layer.weights_run |= self.core.stage == "weights"
            if self.versions != [*map(_version, self.args)]:
                raise RuntimeError(
                    "convert: weights that a layer returned or kept are looked at after a tensor "
                    "that they are made of has changed; look at them before, or undo its conversion"
                )
            inference, grad = self.state
            args = [x.run() if type(x) is Step else x for x in self.args]
            with (
                _C.DisableTorchFunction(), torch.inference_mode(inference),
                torch.set_grad_enabled(grad), torch.autocast("cpu", *self.autocast),
            ):  # fmt: skip
                self.value = self.function(*args, **self.kwargs)
            self.args = ()
        return self.value

    def without_dropout(self) -> Any:
        if self.value is not None:
            return self.value
        args = [x.without_dropout() if type(x) is Step else x for x in self.args]
        is_dropout = getattr(self.function, "__name__", "") == "dropout"
        return args[0] if is_dropout else self.function(*args, **self.kwargs)

    def uses(self, tensor: Tensor) -> bool:
        """Whether it has yet to read what the tensor holds."""
        args = [x.value if type(x) is Step else x for x in self.args]
        used = (self.core.query, self.core.key, *self.core.terms, *args)
        storage = tensor.untyped_storage().data_ptr()
        return any(x.untyped_storage().data_ptr() == storage for x in used if isinstance(x, Tensor))


class Scores:
    """A tensor of scores or weights, `[..., L, S]`, that is put off."""

    __slots__ = ("__weakref__", "dtype", "shape", "step", "views")
    device = torch.device("cpu")

    def __init__(self, step: Step, shape: torch.Size, dtype: torch.dtype):
        self.step, self.shape, self.dtype = step, shape, dtype
        self.views = [weakref.ref(self)]  # all that are views of one tensor, itself among them

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        found = _put_off(func, args, kwargs)
        if found is None:
            args, kwargs = tree_map_only(Scores, lambda x: x.step.run(), (tuple(args), kwargs))
            found = func(*args, **kwargs)
        return found

    def __getattr__(self, name: str) -> Any:
        found = getattr(Tensor, name)
        if name in _LAYOUT:
            return getattr(torch.empty(self.shape, device="meta"), name)
        if callable(found):
            return functools.partial(self._call, found)
        return getattr(self.step.run(), name)

    def _call(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        return self.__torch_function__(function, (), (self, *args), kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.step.run().__reduce_ex__(protocol)

    __hash__ = object.__hash__


for _name in (
    *("add", "radd", "iadd", "sub", "rsub", "isub", "mul", "rmul", "imul", "truediv", "itruediv"),
    *("rtruediv", "matmul", "rmatmul", "neg", "pos", "abs", "pow", "rpow", "floordiv", "rfloordiv"),
    *("mod", "rmod", "contains", "eq", "ne", "lt", "gt", "le", "ge", "and", "or", "getitem"),
    *("setitem", "len", "bool", "float", "iter", "format", "repr", "array"),
):
    _name = f"__{_name}__"
    setattr(Scores, _name, functools.partialmethod(Scores._call, getattr(Tensor, _name)))


def _introduce() -> None:
    """Has einops take a Scores for what torch has, since it goes by types. Where einops keeps them
    elsewhere it says "Tensor type unknown", as to any type that it does not know."""
    einops: Any = sys.modules.get("einops._backends")
    if Scores not in getattr(einops, "_type2backend", {Scores}):
        einops._type2backend[Scores] = einops.get_backend(torch.empty(0))


def start(layer: Any, function: Any, args: Any, kwargs: Any) -> Scores | None:
    """A product of two tensors, put off, if it may be scores."""
    core = begin(function.__name__.strip("_"), *args, **kwargs)
    if core is None or not has_kernels(core.query):
        return None
    shape = torch.Size((*core.lead, core.query.shape[-2], core.key.shape[-2]))
    if shape.numel() * core.query.shape[-1] < SMALL:
        layer.is_small = True
        return None
    _introduce()  # not once for a layer, which a pickle may bring where einops comes later
    autocast = torch.is_autocast_enabled("cpu")
    dtype = torch.get_autocast_dtype("cpu") if autocast else core.query.dtype
    return Scores(Step(layer, core, function, args, kwargs), shape, dtype)


@functools.cache
def kind_of(function: Any) -> str:
    """What a function that torch calls is to a layer."""
    name = getattr(function, "__name__", "")
    if function in _STARTS:
        return "product"
    if name == "scaled_dot_product_attention":
        return "attention"
    return "change" if name in _SETTERS or _is_in_place(name) else ""


def run_before(layer: Any, changed: Any) -> None:
    """What is put off and uses a tensor that is about to change."""
    if layer.steps and type(changed) is Scores:
        changed = changed.step.run()
    if layer.steps and isinstance(changed, (tuple, list)):
        for x in changed:
            run_before(layer, x)
    elif layer.steps and isinstance(changed, Tensor):
        for step in [x() for x in layer.steps]:
            if step is not None and step.value is None and step.uses(changed):
                step.run()


def _is_in_place(name: str) -> bool:
    return name in _IN_PLACE or (name.endswith("_") and not name.endswith("__"))


def _put_off(function: Any, args: Any, kwargs: Any) -> Any:
    """What the function gives, if it can be put off or is the attention; else None."""
    name = str(function.__name__)
    is_in_place = _is_in_place(name)
    name = _IN_PLACE.get(name) or name.strip("_")
    named = (*kwargs.values(),)  # tensors of which a Step would not keep track; or out
    if not args or "alpha" in kwargs or any(isinstance(x, (Tensor, Scores)) for x in named):
        return None
    if name in _LIKE and type(args[1]) is Scores:
        args = (args[0], torch.empty(args[1].shape, device="meta"))
        if type(args[0]) is not Scores:
            return function(*args)
    name, x, rest = _first(name, args)
    if x is None or x.step.value is not None or (is_in_place and x is not args[0]):
        return None  # what changes in place may be a tensor
    if is_in_place and not torch.is_grad_enabled() and x.step.core.has_gradient():
        return None  # the gradient is that of what it was before
    if name in _PRODUCTS:
        return None if kwargs else _product(function, x, args)
    found = _changed(name, function, x, rest, kwargs)
    if found is None or isinstance(found, Scores):
        return found
    core, shape, dtype = found
    if is_in_place:
        changed, kept = getattr(Tensor, name), x.dtype
        function = lambda *args, **kwargs: changed(*args, **kwargs).to(kept)  # noqa: E731
    step = Step(x.step.layer, core, function, args, kwargs)
    if is_in_place:
        for other in [view() for view in x.views]:
            if other is not None and other is not x:
                other.step = Step(step.layer, core, Tensor.reshape, (step, other.shape), {})
        x.step = step
        return x
    result = Scores(step, shape, dtype)
    if name in _VIEWS:
        result.views = x.views
        x.views.append(weakref.ref(result))
    return result


def _first(name: str, args: Any) -> tuple[str, Scores | None, list[Any]]:
    """The function by the name and the arguments that it would have as a method of a Scores."""
    first, rest = args[0], [*args[1:]]
    if type(first) is Scores:
        return name, first, rest
    if name in ("add", "mul") and type(rest[0]) is Scores:
        return name, rest[0], [first]
    if name == "einsum" and type(rest[0]) is Scores:
        return name, rest[0], rest[1:]
    if name == "where" and len(rest) == 2 and getattr(first, "dtype", None) == torch.bool:
        if type(rest[0]) is Scores:
            return "masked_fill", rest[0], [~first, rest[1]]
        if type(rest[1]) is Scores:
            return "masked_fill", rest[1], [first, rest[0]]
    return name, None, rest


def _changed(
    name: str, function: Any, x: Scores, rest: Any, kwargs: Any
) -> Scores | tuple[Core, torch.Size, torch.dtype] | None:
    """What a Scores becomes; itself if it stays what it is."""
    core, shape, dtype = x.step.core, x.shape, x.dtype
    if name in _VIEWS:
        shape = function(torch.empty(shape, device="meta"), *rest, **kwargs).shape
        return core, shape, dtype
    if name in _DTYPES or name in ("to", "type", "type_as"):
        to = _DTYPES.get(name, rest[0] if len(rest) == 1 else kwargs.get("dtype"))
        to = getattr(to, "dtype", to)
        if not isinstance(to, torch.dtype) or not to.is_floating_point or {*kwargs} - {"dtype"}:
            return None
        return x if to == dtype else (core, shape, to)
    if rest and type(rest[0]) is Scores:
        other = rest[0].step
        is_row = other.core.stage == "row" and rest[0].shape == (*shape[:-1], 1)
        rest = [other.core if is_row else other.run(), *rest[1:]]
    if name == "contiguous":
        return x
    core = change(name, core, shape, *rest, **kwargs)
    if core is None:
        return None
    if name == "amax":
        shape = function(torch.empty(shape, device="meta"), *rest, **kwargs).shape
    if name == "softmax":
        given = (x for x in (*rest, *kwargs.values()) if isinstance(x, torch.dtype))
        dtype = next(given, dtype)
    elif rest and isinstance(rest[0], Tensor) and rest[0].dim() and name != "masked_fill":
        dtype = torch.promote_types(dtype, rest[0].dtype)
    return core, shape, dtype


def _product(function: Any, weights: Scores, args: Any) -> Tensor | None:
    """Of weights with values, by qkv; None if it is none, or comes to something else."""
    *equation, first, value = args
    step, layer = weights.step, weights.step.layer
    if first is not weights or type(value) is not Tensor:
        return None
    orders = as_product(equation[0]) if equation else ([], [*range(value.dim())], [])
    if orders is None or orders[0] != sorted(orders[0]):
        return None
    if value.dtype != weights.dtype and not torch.is_autocast_enabled("cpu"):
        return None
    value = value.permute(orders[1])
    output = attend(step.core, weights.shape, value)
    if output is None:
        return None
    if not layer.is_matched:
        with torch.no_grad(), _C.DisableTorchFunction():
            undropped = step.core._replace(dropout=0.0)
            found = attend(undropped, weights.shape, value) if step.core.dropout else output
            assert found is not None
            expected = torch.matmul(step.without_dropout(), value)
            layer.is_matched = _is_close(found, expected)
        if not layer.is_matched:
            layer.refused = "its softmax(query @ key) @ value differs from qkv's"
            return None
    layer.is_taken = True
    output = output.permute(orders[2]) if equation else output
    # A product keeps its factors for the backward pass, attention its output too, which the layer
    # may change in place.
    return output.clone() if output.requires_grad else output


def settle(output: Any, is_taken: bool) -> Any:
    """What a layer returns. Weights that qkv has used stay put off: few look at them."""
    if type(output) is Scores:
        is_weights = output.step.value is None and output.step.core.stage == "weights"
        return output if is_weights and is_taken else output.step.run()
    if type(output) in (tuple, list):
        return type(output)(settle(x, is_taken) for x in output)
    return output


def settle_model(module: Any, args: Any, output: Any) -> Any:
    """A hook behind the forward pass of a model: weights that layers in it returned are computed
    where they leave it."""
    if torch.compiler.is_compiling():
        return output
    return tree_map_only(Scores, lambda x: x.step.run(), output)


def _is_close(found: Tensor, expected: Tensor) -> bool:
    """Where it is finite: what a query gets that sees nothing may be anything."""
    known = expected.isfinite()
    far = (found - expected).abs()[known]
    return not far.numel() or bool(far.max() <= _CLOSE[found.dtype] * expected[known].abs().max())
