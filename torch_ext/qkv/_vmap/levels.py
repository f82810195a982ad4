"""The two vmaps of torch, each of which has a dispatch key: torch.func's, and the one of torch's
core, which torch.autograd.grad(is_grads_batched=True), torch.autograd.functional.jacobian and
gradcheck use.

A kernel for either takes the samples of one level of vmap out of the arguments, applies a rule to
them, rule(op, samples, options), which returns results and their batch dimensions, and puts these
into that level again. Outer levels are the business of the calls that the rule makes. The options
of a rule are all arguments that are not tensors, those among them that could be and are None.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._functorch.autograd_function import custom_function_call_vmap_helper
from torch._functorch.pyfunctorch import retrieve_current_functorch_interpreter

from qkv._vmap.samples import Samples

_core: Any = torch  # its stubs leave out what is private
Rule = Callable[[Any, Samples, dict[str, Any]], tuple[Any, Any]]


def taken_apart(op: Any, args: Any, kwargs: Any) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The arguments of a call of the operator by name: its tensors, and all others."""
    names = (argument.name for argument in op._schema.arguments)
    call = dict(zip(names, args, strict=False)) | kwargs
    tensors = {name: x for name, x in call.items() if isinstance(x, Tensor)}
    return tensors, {name: x for name, x in call.items() if name not in tensors}


def put_together(op: Any, results: Any, made: Callable[[str, Tensor], Any]) -> tuple[Any, ...]:
    """made(name, result) of each result of a call of the operator, None where there is none."""
    named = zip((result.name for result in op._schema.returns), results, strict=True)
    return tuple(None if x is None else made(name, x) for name, x in named)


def _overload(name: str) -> Any:
    return getattr(torch.ops.qkv, name).default


def decomposition(name: str) -> Callable:
    """Of an operator that is made of others."""
    return lambda *args, **kwargs: _overload(name).decompose(*args, **kwargs)


def kernel(name: str, of_level: Callable[..., Any], rule: Rule) -> Callable:
    """Of an operator, for the vmap whose levels of_level knows: in_func or in_core."""

    def call(*args: Any, **kwargs: Any) -> Any:
        op = _overload(name)
        return of_level(op, rule, *taken_apart(op, args, kwargs))

    return call


def in_func(op: Any, rule: Rule, tensors: dict[str, Tensor], options: dict[str, Any]) -> Any:
    """For torch.func.vmap. As torch.library.register_vmap makes it, but for tensors that are
    keywords, too."""

    def apply(*operands: Tensor) -> Any:
        return op(**dict(zip(tensors, operands, strict=True)), **options)

    def apply_to_all(info: Any, in_dims: tuple[int | None, ...], *operands: Tensor):
        values = dict(zip(tensors, operands, strict=True))
        dims = dict(zip(tensors, in_dims, strict=True))
        return rule(op, Samples(values, dims, info.batch_size, info.randomness), options)

    interpreter: Any = retrieve_current_functorch_interpreter()
    return custom_function_call_vmap_helper(interpreter, apply_to_all, apply, *tensors.values())


def _at_level(tensor: Tensor, level: int) -> Tensor | None:
    """[size, ...] of a tensor that is batched at this level of the core's vmap; None of others."""
    # What is not batched at this level is expanded to any size that is asked for.
    one, two = (_core._remove_batch_dim(tensor, level, size, 0) for size in (1, 2))
    return one if one.size(0) == two.size(0) else None


def in_core(op: Any, rule: Rule, tensors: dict[str, Tensor], options: dict[str, Any]) -> Any:
    """For the vmap of torch's core, which knows no randomness: all samples drop the same."""
    level = torch._C._vmapmode_increment_nesting() - 1
    torch._C._vmapmode_decrement_nesting()
    batched: dict[str, Tensor] = {}
    while not batched and level > 0:
        found = {name: _at_level(x, level) for name, x in tensors.items()}
        batched = {name: x for name, x in found.items() if x is not None}
        level -= not batched
    size = next(iter(batched.values())).size(0)
    dims = {name: 0 if name in batched else None for name in tensors}
    results, out_dims = rule(op, Samples(tensors | batched, dims, size, "same"), options)
    return tuple(
        x if dim is None else _core._add_batch_dim(x, dim, level)
        for x, dim in zip(results, out_dims, strict=True)
    )
