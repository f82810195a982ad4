"""A call with other arguments than the other ranks' must be an error on all ranks, at once."""

import hashlib
import itertools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from qkv.distributed._ranks import Team
from qkv.distributed._transport import all_gather, telling

Facts = dict[str, Any]
P = ParamSpec("P")
T = TypeVar("T")
_calls = itertools.count()


def eager(function: Callable[P, T]) -> Callable[P, T]:
    """The function, which torch.compile is not to look into. What ranks tell each other is no part
    of a graph, and what depends on it would be compiled for the numbers of one call. As a decorator
    torch.compiler.disable would import torch._dynamo, which takes a second."""
    if not torch.compiler.is_dynamo_compiling():
        return function
    return cast("Callable[P, T]", torch.compiler.disable(function))


def agree(
    facts: Facts, team: Team, number: int = 0, failure: Exception | None = None
) -> tuple[int, Team]:
    """Compares what each rank says about its call: printable facts by the names of arguments, with
    the "function" that was called. Returns the `number`, of 64 bits, of the team's first, and the
    team with the number of the call: how many calls that first rank has made before.

    Only a hash of the facts travels, beside the numbers, and the facts themselves once the hashes
    differ: 24 bytes a rank.

    Raises:
        RuntimeError: on every rank alike, naming an argument and the values of two ranks, or the
            failure of one, which is what that rank has to complain of.
    """
    function = facts["function"]
    if failure is not None:
        facts = {**facts, "error": str(failure) or type(failure).__name__}
    doing = f"{function}: comparing the arguments with the other ranks'"
    text = repr(list(facts.items())).encode()
    digest = hashlib.blake2b(text, digest_size=8).digest()
    mine = torch.tensor([int.from_bytes(digest, "little", signed=True), number, next(_calls)])
    all_of_them = mine[None]
    for ranks in team.all:
        all_of_them = torch.cat(all_gather(all_of_them, ranks, doing))
    if (all_of_them[:, 0] != all_of_them[0, 0]).any():
        said = {team.ring.name(team.ring.rank): facts}
        for ranks in team.all:
            found: list[dict[str, Facts]] = [{}] * ranks.size
            with telling(doing):
                dist.all_gather_object(found, said, group=ranks.group)
            said = {rank: facts for part in found for rank, facts in part.items()}
        raise RuntimeError(f"{function}: {_difference(said)}") from failure
    if failure is not None:
        raise RuntimeError(f"{function}: {facts['error']}") from failure
    return int(all_of_them[0, 1]), team.of_call(int(all_of_them[0, 2]))


def _difference(said: dict[str, Facts]) -> str:
    for rank, facts in said.items():
        if "error" in facts:
            return f"on {rank}: {facts['error']}"
    (first, expected), *others = said.items()
    for other, facts in others:
        for name in {**expected, **facts}:
            if expected.get(name) != facts.get(name):
                return (
                    f"{name} is {expected.get(name)} on {first}, but {facts.get(name)} on {other}; "
                    "the same is expected on all ranks"
                )
    raise AssertionError("two hashes differ, and nothing that was hashed")


def told(tensor: Tensor) -> str:
    """What is said about a tensor: dtype, shape, where it is, whether its gradient is wanted."""
    where = "" if tensor.device.type == "cpu" else f" on {tensor.device.type}"
    needs = " that requires grad" if torch.is_grad_enabled() and tensor.requires_grad else ""
    return f"{str(tensor.dtype).removeprefix('torch.')} {[*tensor.shape]}{where}{needs}"
