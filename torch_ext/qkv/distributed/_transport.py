"""What goes from rank to rank, and errors that say what was on its way when a rank failed."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from qkv.distributed._ranks import Ranks


def wide(dtype: torch.dtype) -> torch.dtype:
    """What is computed in, and what gradients travel and are added up in."""
    return torch.promote_types(dtype, torch.float32)


@contextmanager
def telling(doing: str) -> Iterator[None]:
    """Errors of torch.distributed say what this process was doing."""
    try:
        yield
    except RuntimeError as error:
        raise RuntimeError(
            f"{doing} failed; another rank has ended, raised an error of its own or makes other "
            f"calls than this one: {error}"
        ) from error


_NUMBER = 16  # bytes before what an all-to-all moves: the call's number, and what aligns the rest
Begin = Callable[[Tensor], dist.Work | None]


class Messages:
    """Contiguous tensors on their way to another rank or from it, while this rank computes. What is
    sent must not change before wait(). Without `begin` they are here already."""

    def __init__(self, tensors: list[Tensor], begin: Begin | None = None, doing: str = ""):
        self._tensors, self._doing = tensors, doing
        with telling(doing):
            self._works = [begin(_as_bytes(x)) for x in tensors if begin and x.numel()]

    def wait(self) -> list[Tensor]:
        """What was sent or received, when it has been."""
        with telling(self._doing):
            while self._works:
                if (work := self._works.pop(0)) is not None:
                    work.wait()
        return self._tensors


def send(tensors: list[Tensor], ranks: Ranks, to: int, kind: int, doing: str) -> Messages:
    begin = partial(dist.isend, group=ranks.group, group_dst=to, tag=ranks.tag(kind))
    return Messages(tensors, begin, f"{doing} to {ranks.name(to)}")


def receive(tensors: list[Tensor], ranks: Ranks, source: int, kind: int, doing: str) -> Messages:
    begin = partial(dist.irecv, group=ranks.group, group_src=source, tag=ranks.tag(kind))
    return Messages(tensors, begin, f"{doing} from {ranks.name(source)}")


def all_to_all(parts: Sequence[Tensor], ranks: Ranks, doing: str) -> list[Tensor]:
    """parts[r] goes to rank r: all of one shape. Returns what came from each.

    Raises:
        RuntimeError: also if what came is of another call of this group.
    """
    first = parts[0]
    if first.numel() == 0:
        return list(parts)
    sent = torch.empty(ranks.size, _NUMBER + first.nbytes, dtype=torch.uint8)
    received = torch.empty_like(sent)
    numbers = torch.tensor([ranks.call, 0]).view(torch.uint8)
    for row, part in zip(sent, parts, strict=True):
        row[:_NUMBER] = numbers
        row[_NUMBER:].view(first.dtype).view(first.shape).copy_(part)
    with telling(doing):
        dist.all_to_all_single(received, sent, group=ranks.group)
        for rank, row in enumerate(received):
            if not row[:_NUMBER].equal(numbers):
                raise RuntimeError(f"{ranks.name(rank)} has sent what belongs to another call")
    return [row[_NUMBER:].view(first.dtype).view(first.shape) for row in received]


def all_gather(tensor: Tensor, ranks: Ranks, doing: str) -> list[Tensor]:
    """The tensor of each rank: all of one shape."""
    if tensor.numel() == 0:
        return [tensor] * ranks.size
    tensor = tensor.contiguous()
    received = [torch.empty_like(tensor) for _ in range(ranks.size)]
    with telling(doing):
        dist.all_gather([_as_bytes(x) for x in received], _as_bytes(tensor), group=ranks.group)
    return received


def _as_bytes(tensor: Tensor) -> Tensor:
    """A contiguous tensor as one of a dtype that every backend can send: a view, but of what is
    conjugate or negative by a bit alone."""
    return tensor.detach().resolve_conj().resolve_neg().view(-1).view(torch.uint8)


def linear(
    function: Callable, transposed: Callable, *tensors: Tensor, **how: Any
) -> tuple[Tensor, ...]:
    """function(tensor, **how) of each, whose gradient is transposed(that of the result, **how),
    with every derivative. What moves numbers between ranks is linear. All of them are one node of
    autograd's graph: a rank that needs the gradient of one alone still takes part in the others."""
    return _Apply.apply(function, transposed, how, *tensors)


class _Apply(Function):
    @staticmethod
    def forward(function: Callable, transposed: Callable, how: dict[str, Any], *tensors: Tensor):
        return tuple(function(tensor, **how) for tensor in tensors)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.function, ctx.transposed, ctx.how, *_ = inputs

    @staticmethod
    def backward(ctx, *grads):
        return None, None, None, *linear(ctx.transposed, ctx.function, *grads, **ctx.how)

    @staticmethod
    def jvp(ctx, *tangents):
        return linear(ctx.function, ctx.transposed, *tangents[3:], **ctx.how)
