"""What an operator does when it meets DTensors: every process calls it on its own part.

The functions here are what torch.library.register_torch_dispatch calls, with (DTensor, operator,
types, args, kwargs). They are below autograd, whose graph has the operator itself.
"""

from collections.abc import Container, Mapping
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.nn.functional import pad

from qkv._refuse import refuse
from qkv._vmap.levels import put_together, taken_apart
from qkv.distributed._dtensor import context_parallel
from qkv.distributed._dtensor.layout import HEADS, layout_of
from qkv.distributed._dtensor.plan import Plan, plan_of, sizes_of


def decompose(cls: type, op: Any, types: Any, args: Any, kwargs: Any) -> Any:
    """Of operators that are made of others: in inference mode they get here themselves."""
    return op.decompose(*args, **kwargs)


@torch.no_grad()
def seed_rule(cls: type, op: Any, types: Any, args: Any, kwargs: Any) -> Any:
    """One seed for all processes, even if their generators are in different states: the largest of
    those that they draw. If the states are the same, it is what a single process would draw."""
    mesh = args[0].device_mesh
    drawn = DTensor.from_local(op(args[0].to_local()), mesh, [Partial("max")] * mesh.ndim)
    return drawn.redistribute(placements=[Replicate()] * mesh.ndim)


@torch.no_grad()
def rule(cls: type, op: Any, types: Any, args: Any, kwargs: Any) -> Any:
    tensors, options = taken_apart(op, args, kwargs)
    given = on_one_mesh(op, tensors)
    if context_parallel.is_on(given["query"]):
        return context_parallel.attend(op, given, options)
    context_parallel.check_is_on(op, given)
    shapes = shapes_of(op, given, options)
    written = _written(op, given)
    plan = _plan_of(op, given, options, written)
    return call_on_parts(op, given, options | _place(plan, options), plan, shapes, written)


def call_on_parts(
    op: Any, given: Mapping[str, DTensor], options: dict[str, Any], plan: Plan,
    shapes: Mapping[str, torch.Size], written: Container[str] = (),
) -> Any:  # fmt: skip
    """The operator's results, of these shapes as a whole. written: the tensors that it changes."""
    parts = {name: _part(op, plan, name, x, name in written) for name, x in given.items()}
    results = op(**options | parts)
    return put_together(op, results, lambda name, x: _whole(plan, name, x, shapes[name]))


def on_one_mesh(op: Any, tensors: Mapping[str, Tensor]) -> dict[str, DTensor]:
    """The tensors as DTensors.

    Raises:
        RuntimeError: for tensors on different meshes; for a tensor that is none of DTensor's, since
            nobody knows what part of the whole it is (numbers aside, and within torch's
            `implicit_replication()`); on a process that has no place in the mesh.
    """
    name = op._schema.name
    first = next(n for n, x in tensors.items() if isinstance(x, DTensor))
    mesh = tensors[first].device_mesh  # type: ignore[union-attr]
    replicated = [Replicate()] * mesh.ndim
    found = {}
    for n, x in tensors.items():
        if not isinstance(x, DTensor):
            if x.dim() > 0 and not DTensor._op_dispatcher._allow_implicit_replication:
                wanted = f"{first} is a DTensor; expected a DTensor, too: "
                wanted += f"DTensor.from_local({n}, mesh) if all processes have the same one, "
                wanted += f"or distribute_tensor({n}, mesh, placements)"
                refuse(n, "a torch.Tensor", wanted, RuntimeError, name)
            x = DTensor.from_local(x, mesh, replicated)
        elif x.device_mesh != mesh:
            wanted = f"{first} on {mesh}; expected one mesh for all tensors"
            refuse(n, f"on {x.device_mesh}", wanted, RuntimeError, name)
        found[n] = x
    if mesh.get_coordinate() is None:
        raise RuntimeError(
            f"{name}: {first} is on {mesh}, in which rank {torch.distributed.get_rank()} has no "
            "place; expected calls from the ranks of the mesh alone"
        )
    return found


def shapes_of(
    op: Any, given: Mapping[str, DTensor], options: dict[str, Any]
) -> dict[str, torch.Size]:
    """Those of the results as a whole. The operator judges the tensors as a whole, too: the parts
    of tensors that do not fit may fit each other."""
    whole = {n: torch.empty(x.shape, dtype=x.dtype, device="meta") for n, x in given.items()}
    named = zip((result.name for result in op._schema.returns), op(**options | whole), strict=True)
    return {name: x.shape for name, x in named if x is not None}


def _written(op: Any, given: Mapping[str, DTensor]) -> list[str]:
    """The caches, if something is appended to them."""
    if "key" not in given:
        return []
    written = (a.name for a in op._schema.arguments if a.alias_info and a.alias_info.is_write)
    return [name for name in written if name in given]


def _plan_of(
    op: Any, given: Mapping[str, DTensor], options: Mapping[str, Any], written: list[str]
) -> Plan:
    layout = layout_of(given, options)
    sizes = sizes_of(layout, {name: x.shape for name, x in given.items()})
    allowed = set(sizes)
    if options.get("reduce") == "heads":
        allowed.discard(HEADS)
    if _needs_places(options):
        # What becomes of a score follows from its place in the whole: the operator must be told
        # it, as one number for the batch items. So they are divided by the outermost
        # dimension alone.
        is_told = any(argument.name == "shard" for argument in op._schema.arguments)
        allowed &= {HEADS, max(sizes, default=HEADS)} if is_told else set()
    tensors = {name: given[name] for name in written} | dict(given)  # caches stay where they are
    plan = plan_of(layout, sizes, tensors, allowed)
    shares = [plan.share(name, given[name].shape) for name in written]
    if any(share and share.head is not None and share.heads > 1 for share in shares):
        # Every process would append to one head of its copy of all heads.
        plan = plan_of(layout, sizes, tensors, allowed - {HEADS})
    return plan


def _needs_places(options: Mapping[str, Any]) -> bool:
    """Whether dropout, or a score program, is something else for other heads or batch items."""
    return bool(options.get("dropout_p") or options.get("score_program"))


def _place(plan: Plan, options: Mapping[str, Any]) -> dict[str, Any]:
    """The option that says which part of the whole a call is, where that matters."""
    if not _needs_places(options) or set(plan.labels) <= {None}:
        return {}
    outermost = max(plan.sizes)
    items = prod(size for label, size in plan.sizes.items() if label not in (HEADS, outermost))
    batch_offset = plan.first(outermost) * items if outermost != HEADS else 0
    return {"shard": [0, 0, 0, 0, plan.first(HEADS), plan.sizes[HEADS], batch_offset]}


def _part(op: Any, plan: Plan, name: str, x: DTensor, is_written: bool) -> Tensor:
    """What this process's call gets of a tensor."""
    placements = tuple(plan.placements(name, x.shape, Replicate()))
    if x.placements != placements:
        if is_written:
            wanted = f"{placements} is expected for something to be appended to it"
            refuse(name, x.placements, wanted, RuntimeError, op._schema.name)
        x = x.redistribute(placements=placements)
    share, local = plan.share(name, x.shape), x.to_local()
    if share is None or share.head is None:
        return local
    return local.narrow(plan.layout(name, x.dim())[HEADS], share.head, 1)


def _whole(plan: Plan, name: str, local: Tensor, shape: torch.Size) -> DTensor:
    """A result of all processes together, of which this one has computed `local`."""
    of, otherwise = name.removeprefix("rotated_").removeprefix("grad_"), Replicate()
    if name.startswith("grad_"):
        local, otherwise = _gradient_of_all_heads(plan, of, local, shape), Partial("sum")
    placements = plan.placements(of, shape, otherwise)
    # Its dimensions lie in memory in the order of `local`'s: what torch can view of the one it can
    # then view of the other.
    strides = torch.empty_permuted(shape, local.dim_order(), device="meta").stride()
    return DTensor.from_local(local, plan.mesh, placements, shape=shape, stride=strides)


def _gradient_of_all_heads(plan: Plan, of: str, local: Tensor, shape: torch.Size) -> Tensor:
    """The gradient of the one head of a key or a value that a call got, among zeros."""
    share = plan.share(of, shape)
    if share is None or share.head is None or share.heads == 1:
        return local
    after = local.dim() - 1 - plan.layout(of, local.dim())[HEADS]  # dimensions
    return pad(local, (0, 0) * after + (share.head, share.heads - share.head - 1))
