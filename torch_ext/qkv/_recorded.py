"""What a function does to tensors without dimensions, operation by operation: see `record`."""

from __future__ import annotations

import operator
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

Place = tuple[str, str, int]  # the name of a function, its file, and a line

# What a value follows from: from numbers in the function's text alone, also from captured tensors,
# or also from the arguments.
CONSTANT, CAPTURED, ARGUMENT = range(3)

# These look at the dtype and the shape of their first argument alone.
_FILLED = frozenset("new_ones new_zeros new_full ones_like zeros_like full_like".split())
_DIVISIONS = frozenset("floor_divide remainder fmod div".split())
# These read a tensor's numbers where no operation is seen.
_READING = frozenset(
    "tolist numpy __array__ __dlpack__ data_ptr storage untyped_storage __reduce_ex__ "
    "__deepcopy__".split()
)
_REQUIRES_GRAD: Any = getattr(Tensor.requires_grad, "__get__")  # noqa: B009
_INDEX = (torch.int32, torch.int64, torch.int16, torch.int8)
_VALUES = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
_NOT_OF_USERS = tuple(f"{Path(x).parent}{os.sep}" for x in (torch.__file__, __file__))

_CAPTURE = "draw them outside, and capture the tensor"
_WHERE = "write if as torch.where(condition, a, b), and, or, not as &, |, ~; keep numbers tensors"
_WITHOUT_WRITING = "make a new tensor, x = x + y"


class Refused(ValueError):
    """A function does what cannot be recorded or expressed."""

    def __init__(self, what: str, place: Place, instead: str) -> None:
        super().__init__(f'{what}, in {place[0]} ("{place[1]}", line {place[2]}): {instead}')


@dataclass(eq=False, slots=True)
class Node:
    """A value, and the operation that it is the result of.

    like: a tensor of its dtype and shape; of a CONSTANT the value itself.
    function: the operation; None of an argument and of a captured tensor.
    args, kwargs: of the operation, with nodes in place of tensors.
    """

    like: Tensor
    level: int
    place: Place
    function: Any = None
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    output: int | None = None  # which of several results
    called: str = ""  # the operation of the user, which may have been decomposed
    has_gradient: bool = True  # not within no_grad, nor behind detach
    shares: bool = False  # whether it is a view, or has views

    @property
    def name(self) -> str:
        """Of the operation: `add` of `aten.add_.Tensor`."""
        name = self.function._schema.name.split("::")[-1]
        return name.removesuffix("_") if self.function._schema.is_mutable else name

    @property
    def inputs(self) -> list[Node]:
        return nodes_in((self.args, self.kwargs))

    def run(self, of: Callable[[Node], Any], call: Callable[..., Any] | None = None) -> Any:
        """The operation on other tensors, which stay as they are. call: calls an operation."""
        call = call or (lambda function, *args, **kwargs: function(*args, **kwargs))
        args, kwargs = replaced((self.args, self.kwargs), of)
        if self.function._schema.is_mutable:
            args = (call(torch.ops.aten.clone.default, args[0]), *args[1:])
        result = call(self.function, *args, **kwargs)
        return result if self.output is None else call(operator.getitem, result, self.output)


@dataclass(eq=False)
class Recording:
    """nodes: of the operations, in their order. result: a node, if the function gives a tensor.
    place: of the function."""

    arguments: list[Node]
    captured: list[tuple[Tensor, Node]]
    nodes: list[Node]
    result: Any
    place: Place


def replaced(x: Any, of: Callable[[Any], Any], kind: type = Node) -> Any:
    """x, with `of(y)` for each y of the kind in it."""
    if isinstance(x, kind):
        return of(x)
    if type(x) in (tuple, list):
        return type(x)([replaced(y, of, kind) for y in x])
    return {name: replaced(y, of, kind) for name, y in x.items()} if type(x) is dict else x


def nodes_in(x: Any) -> list[Node]:
    found: list[Node] = []
    replaced(x, found.append)
    return found


@contextmanager
def outside() -> Iterator[None]:
    """Of all that is around a call: torch.func, tracers, FakeTensorMode, autocast, no_grad."""
    away = (torch._C._DisableFuncTorch(), torch._C._DisableAutocast(), _disable_current_modes())
    with away[0], away[1], away[2], torch.enable_grad():
        yield


def record(
    function: Callable[..., Any],
    dtypes: Sequence[torch.dtype],
    is_known: Callable[[str], bool] = lambda name: True,
    here: Callable[[], Place] | None = None,
) -> Recording:
    """Calls `function` once, on zeros without dimensions of these dtypes, and with zeros in place
    of what it captures: no number of a captured tensor is read, and nothing is written to it.

    is_known: whether an operation of this name is recorded; others are decomposed, where torch
        says into what.
    here: the line of the user that is being run, where it is not to be seen from Python's stack.

    Raises:
        Refused: it reads a number of a tensor, as `if` does, draws random numbers, or writes into
            what is captured or has views.
    """
    code = getattr(function, "__code__", None)
    place = code and (code.co_name, code.co_filename, code.co_firstlineno)
    recorder = _Recorder(place or (repr(function), "?", 0), is_known)
    recorder.here = here or recorder.here
    with outside():
        zeros = [torch.zeros((), dtype=x, device="cpu") for x in dtypes]
        arguments = [recorder.add(x, ARGUMENT) for x in zeros]
        with recorder, _StandingIn(recorder):
            result = function(*zeros)
    result = recorder.node_of(result) if isinstance(result, Tensor) else result
    return Recording(arguments, recorder.captured, recorder.nodes, result, recorder.place)


class _Recorder(TorchDispatchMode):
    def __init__(self, place: Place, is_known: Callable[[str], bool]) -> None:
        super().__init__()
        self.place, self.is_known = place, is_known
        self.nodes: list[Node] = []
        self.captured: list[tuple[Tensor, Node]] = []
        self.known: dict[int, Node] = {}  # by the ids of tensors that are kept alive
        self.called: str | None = None  # what is being decomposed

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # or torch imports its compiler, which takes seconds

    def add(self, like: Tensor, level: int, *operation: Any, **state: Any) -> Node:
        node = self.known[id(like)] = Node(like, level, self.here(), *operation, **state)
        if operation:
            node.called = self.called or str(node.function)
            self.nodes.append(node)
        return node

    def here(self) -> Place:
        """The line of the user that is being run."""
        frame = sys._getframe(1)
        while frame is not None:
            code = frame.f_code
            if not code.co_filename.startswith(_NOT_OF_USERS):
                return code.co_name, code.co_filename, frame.f_lineno
            frame = frame.f_back
        return self.place

    def refused(self, what: str, instead: str) -> Refused:
        return Refused(what, self.here(), instead)

    def node_of(self, x: Tensor) -> Node:
        """Of a tensor that the function meets: one that is not known is captured."""
        if id(x) not in self.known:
            with torch._C._DisableTorchDispatch():
                sizes = [int(n) for n in x.shape]  # tables have those that they have now
                like = torch.zeros((), dtype=x.dtype, device="cpu").expand(sizes)
            self.known[id(x)] = self.add(like, CAPTURED)
            self.captured.append((x, self.known[id(x)]))
        return self.known[id(x)]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func._schema.name.startswith("aten::lift_fresh"):  # a tensor that the function makes
            return self.add(args[0].clone(), CONSTANT).like
        operation = (func, *replaced((args, kwargs), self.node_of, Tensor))
        inputs = nodes_in(operation[1:])
        of = Node(torch.empty(()), CONSTANT, self.place, *operation)
        level = CONSTANT if of.name in _FILLED else max((x.level for x in inputs), default=CONSTANT)
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise self.refused(f"{func} draws random numbers", _CAPTURE)
        reads = not _VALUES.isdisjoint(func.tags) and not _is_place(of)
        if level != CONSTANT and reads:
            raise self.refused(f"{func} reads a number of a tensor", _WHERE)
        if level == ARGUMENT and not self.is_known(of.name):
            result = self.decomposed(func, args, kwargs)
            if result is not NotImplemented:
                return result
        if func._schema.is_mutable:
            return self.written(of, level, args)
        result = _executed(of, level)
        results = [result] if isinstance(result, Tensor) else result
        if not isinstance(results, (tuple, list)):
            if level == CONSTANT:
                return result
            raise self.refused(f"{func} gives a {type(result).__name__} of a tensor", _WHERE)
        has_gradient = torch.is_grad_enabled() and of.name != "detach"
        for n, x in enumerate(results):
            output = n if results is result else None
            node = self.add(x, level, *operation, output=output, has_gradient=has_gradient)
            if func.is_view:
                inputs[0].shares = node.shares = True
        return result

    def decomposed(self, func: Any, args: Any, kwargs: Any) -> Any:
        from torch._decomp import decomposition_table

        outer, self.called = self.called, self.called or str(func)
        with self:
            result = decomposition_table.get(func, func.decompose)(*args, **kwargs)
        self.called = outer
        return result

    def written(self, of: Node, level: int, args: Any) -> Tensor:
        """What an operation in place gives is a value of its own, which the tensor's name has from
        now on. The tensor itself stays as it is."""
        first = of.args[0] if of.args else None
        if not isinstance(first, Node) or not of.function._schema.name.endswith("_"):
            raise self.refused(f"{of.function} writes into a tensor", _WITHOUT_WRITING)
        if first.shares or (first.level == CAPTURED and first.function is None):
            kind = "has views" if first.shares else "is captured"
            raise self.refused(f"{of.function} writes into a tensor that {kind}", _WITHOUT_WRITING)
        result = of.run(lambda x: x.like)
        operation = (of.function, of.args, of.kwargs)
        node = self.add(result, level, *operation, has_gradient=torch.is_grad_enabled())
        self.known[id(args[0])] = node
        return args[0]


def _is_place(of: Node) -> bool:
    """Whether it looks a table up at indices, not at all that a mask shows."""
    return of.name == "index" and all(x is None or x.like.dtype in _INDEX for x in of.args[1])


def _executed(of: Node, level: int) -> Any:
    """The operation on stand-ins, which must not fail for what their zeros are."""
    if level != CONSTANT and _is_place(of):
        table, indices = of.args
        if len(indices) > table.like.dim():  # as torch says it of numbers
            raise IndexError(f"too many indices for tensor of dimension {table.like.dim()}")
        if all(x is None or not x.like.dim() for x in indices):
            sizes = table.like.shape
            left = [n for d, n in enumerate(sizes) if d >= len(indices) or indices[d] is None]
            return torch.zeros((), dtype=table.like.dtype).expand(left)
    if of.name in _DIVISIONS and len(nodes_in(of.args[1:])) == 1 and level != CONSTANT:
        divisor = of.args[1]
        return of.run(lambda x: torch.ones_like(x.like) if x is divisor else x.like)
    return of.run(lambda x: x.like)


class _StandingIn(TorchFunctionMode):
    """Puts stand-ins in place of captured tensors before anything else sees them, whatever these
    are wrapped in, and looks up by tensors without reading them."""

    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in _READING:
            raise self.recorder.refused(f"{name} reads the numbers of a tensor", _WHERE)
        if name == "detach_":  # which is no operation to those behind it
            raise self.recorder.refused("detach_ changes a tensor", "x = x.detach() is expected")
        if func == _REQUIRES_GRAD:  # which stand-ins have not
            with torch._C.DisableTorchFunction():
                return func(*args)
        args, kwargs = replaced((args, kwargs or {}), self._stand_in, Tensor)
        indices = _indices(*args) if func is Tensor.__getitem__ else None
        return func(*args, **kwargs) if indices is None else torch.ops.aten.index(*indices)

    def _stand_in(self, x: Tensor) -> Tensor:
        known = self.recorder.known.get(id(x))
        is_own = known is not None and (known.level != CAPTURED or known.function is not None)
        return x if is_own else self.recorder.node_of(x).like


def _indices(table: Tensor, index: Any) -> tuple[Tensor, list[Tensor | None]] | None:
    """The arguments of `aten.index` for `table[index]` where a tensor without dimensions is among
    them, which Python would read; None where it is left to torch."""
    items = list(index) if isinstance(index, tuple) else [index]
    if not any(isinstance(x, Tensor) and not x.dim() and x.dtype in _INDEX for x in items):
        return None
    for n in [n for n, x in enumerate(items) if x is Ellipsis]:
        left = table.dim() + 1 - sum(x is not None for x in items)
        items[n : n + 1] = [slice(None)] * left
    found: list[Tensor | None] = []
    for n, x in enumerate(items):
        if isinstance(x, Tensor) or type(x) is int:
            found.append(x if isinstance(x, Tensor) else torch.tensor(x))
            items[n] = slice(None)
        elif x is None or isinstance(x, slice):
            found.append(None)
        else:
            return None
    # Slices and new dimensions come first, and then what is looked up in the table that is left.
    is_whole = all(x == slice(None) for x in items)
    return table if is_whole else table[tuple(items)], found
