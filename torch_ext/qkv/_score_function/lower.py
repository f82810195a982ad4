"""A recorded score function as the lines of a program, and as what fills its tables."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import product
from math import prod
from typing import Any

import torch
from torch import Tensor

from qkv._recorded import ARGUMENT, CAPTURED, CONSTANT, Node, Recording, Refused, replaced
from qkv._score_function.instructions import RULES, Instructions, Line, NoRule, Register
from qkv._score_function.recognise import Known, known, written
from qkv._score_function.tables import Remembered, flat, in_int32, joined, name_of

LOOKUPS = frozenset("index select embedding".split())
VIEWS = frozenset("view _unsafe_view unsqueeze squeeze alias detach expand select".split())
FOLDS = {"sum": "add", "mean": "add", "prod": "mul", "amax": "maximum", "amin": "minimum"}
_MOST = 32  # numbers of a row, each of which has an instruction for all that is done with it
_SINGLE = "look single numbers up, such as table[head, query - key]"
_LISTED = "these are expected: " + ", ".join(sorted(x for x in RULES | FOLDS if x[0] != "_"))
_DETACH = torch.ops.aten.detach.default
_KINDS = {torch.bool: "b"}
_KINDS |= dict.fromkeys((torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64), "i")
_KINDS |= dict.fromkeys((torch.float16, torch.bfloat16, torch.float32, torch.float64), "f")
_NARROW = {torch.uint8: (0, 255), torch.int8: (128, 255), torch.int16: (32768, 65535)}


@dataclass
class Lowered:
    """A program without the numbers of its tables, which every call brings along.

    floating: the dtype of its numbers.
    floats, integers: the nodes whose values are the tables, in the order of the joined tensors.
    place: of a captured tensor its number; without it the nodes hold no tensor of the user.
    """

    text: str
    known: Known
    floating: torch.dtype
    floats: list[Node]
    integers: list[Node]
    place: dict[Node, int]
    remembered: Remembered = field(default_factory=Remembered)

    def tables(
        self, captured: Sequence[Tensor], function: Any
    ) -> tuple[Tensor | None, Tensor | None]:
        """All floating tables one after the other, and all of integers and booleans."""
        value = self.values(captured)

        def integers() -> Tensor | None:
            return joined([flat(in_int32(value(x), function)) for x in self.integers])

        floats = joined([flat(value(x)).to(self.floating) for x in self.floats])
        return floats, self.remembered.of([captured[n] for n in self.read], integers)

    def values(self, captured: Sequence[Any], call: Any = None) -> Callable[[Node], Any]:
        """What gives the value of a node, each computed once. call: calls an operation, where it is
        not to be run here."""
        known: dict[Node, Any] = {node: captured[n] for node, n in self.place.items()}

        def value(node: Node) -> Any:
            if node not in known and node.level == CONSTANT:
                like = node.like
                known[node] = call(torch.tensor, like.tolist(), dtype=like.dtype) if call else like
            elif node not in known:
                found = node.run(value, call)
                if not node.has_gradient:
                    found = call(_DETACH, found) if call else _DETACH(found)
                known[node] = found
            return known[node]

        return value

    @functools.cached_property
    def read(self) -> list[int]:
        """The captured tensors that integers follow from."""
        return [self.place[node] for node in _behind(self.integers) if node in self.place]


def _order(row: Node) -> Tensor:
    """A row of the places that its numbers have."""
    return torch.arange(row.like.numel()).view(row.like.shape)


def _behind(nodes: list[Node]) -> set[Node]:
    """All that the numbers of these follow from, and they themselves."""
    left, seen = list(nodes), set(nodes)
    while left:
        node = left.pop()
        new = set(node.inputs) - seen if node.level > CONSTANT else set()
        seen |= new
        left += new
    return seen


def lower(recording: Recording, floating: torch.dtype, function: Any) -> Lowered:
    """function: that was recorded.

    Raises:
        Refused: what the result follows from has no instructions.
    """
    result = recording.result
    if not isinstance(result, Node) or result.like.dim() or _KINDS.get(result.like.dtype) != "f":
        like = result.like if isinstance(result, Node) else None
        gives = type(result).__name__ if like is None else f"{like.dtype}, {list(like.shape)}"
        wanted = "a floating tensor, [], is expected"
        raise Refused(f"score_mod gives {gives}", recording.place, wanted)
    return _Lowering(recording, function).lowered(result, floating)


class _Lowering:
    def __init__(self, recording: Recording, function: Any) -> None:
        self.recording, self.function = recording, function
        self.captured = {node: x for x, node in recording.captured}
        self.p = Instructions()
        self.tables: list[tuple[Node, str]] = []
        self.derived: dict[tuple[Any, ...], Node] = {}  # tables, by those that they are made of
        self.known: dict[Node, list[Register]] = {}
        names = ("score", "batch", "head", "query", "key")
        for node, x in zip(recording.arguments, names, strict=True):
            kind = "f" if x == "score" else "i"
            self.known[node] = [self.p.line((x,), kind, has_gradient=x == "score")]

    def lowered(self, result: Node, floating: torch.dtype) -> Lowered:
        live = _behind([result])
        for node in self.recording.nodes:  # in order, so that what is long is not deep
            is_part = node.like.dim() and not self.is_computed(node)  # of a table
            if node in live and node.level == ARGUMENT and not is_part:
                self.numbers(node)
        final = self.numbers(result)[0].number
        lines = list(self.p.lines)[: final + 1]
        tables: list[Line] = []
        offsets = {"float": 0, "int": 0}
        parts: dict[str, list[Node]] = {"float": [], "int": []}
        for node, kind in self.tables:
            sizes = [int(x) for x in node.like.shape]
            tables.append((f"@{kind}", offsets[kind], *sizes))
            offsets[kind] += prod(sizes)
            parts[kind].append(node)
        place = {node: n for n, (_, node) in enumerate(self.recording.captured)}
        text, of = written(tables, lines), known(tables, lines)
        return Lowered(text, of, floating, parts["float"], parts["int"], place)

    def numbers(self, node: Node) -> list[Register]:
        """Those of a value, in their order."""
        if node not in self.known:
            if not 0 < node.like.numel() <= _MOST:
                what = f"score_mod computes with a tensor of shape {list(node.like.shape)}"
                raise Refused(what, node.place, _SINGLE)
            self.known[node] = self.made(node, self.kind(node))
        return self.known[node]

    def made(self, node: Node, kind: str) -> list[Register]:
        if node.level == CONSTANT:
            try:
                return [self.p.constant(x, kind) for x in node.like.flatten().tolist()]
            except NoRule as error:
                raise Refused("score_mod makes a number", node.place, str(error)) from None
        if not self.is_computed(node):
            return self.looked_up(node, kind)
        numbers = {x: self.numbers(x) for x in node.inputs}
        if not node.has_gradient and any(x.has_gradient for row in numbers.values() for x in row):
            what = f"score_mod computes {node.called} without a gradient (detach, no_grad or "
            what += "autograd.Function)"
            raise Refused(what, node.place, "detach captured tensors, not what follows from scores")
        try:
            found = self.computed(node, kind, numbers)
        except (NoRule, TypeError, OverflowError, ValueError) as error:
            reason = _LISTED if isinstance(error, TypeError) else str(error)
            raise Refused(f"score_mod calls {node.called}", node.place, reason) from None
        return [self.wrapped(x, node) for x in found]

    def is_computed(self, node: Node) -> bool:
        """By instructions; what is not is looked up in a table."""
        if node.function is None:
            return False
        if node.name in LOOKUPS:
            return node.name == "select" and self.is_computed(node.args[0])
        is_number = not any(x.like.dim() for x in node.inputs)
        return node.level == ARGUMENT or (is_number and node.name in RULES and node.has_gradient)

    def computed(
        self, node: Node, kind: str, numbers: dict[Node, list[Register]]
    ) -> list[Register]:
        """numbers: of the inputs."""
        if node.name in FOLDS:
            return self.folded(node, kind, numbers[node.args[0]])
        if node.name in VIEWS and node.like.dtype == node.args[0].like.dtype:
            order = node.function(_order(node.args[0]), *node.args[1:])
            return [numbers[node.args[0]][n] for n in order.flatten().tolist()]
        if node.name not in RULES:
            raise NoRule(_LISTED)
        rows = [x for x in numbers if x.like.dim()]
        order = {x: _order(x).expand(node.like.shape).flatten().tolist() for x in rows}
        found = []
        for n in range(node.like.numel()):
            one = lambda x, n=n: numbers[x][order[x][n] if x in order else 0]  # noqa: E731
            args, kwargs = replaced((node.args, node.kwargs), one)
            found.append(RULES[node.name](self.p, kind, *args, **kwargs))
        return found

    def folded(self, node: Node, kind: str, numbers: list[Register]) -> list[Register]:
        order = _order(node.args[0])
        given = node.args[1] if len(node.args) > 1 else None
        dims = [given] if isinstance(given, int) else given or range(order.dim())
        dims = [d % order.dim() for d in dims]
        rest = [d for d in range(order.dim()) if d not in dims]
        groups = order.permute(*rest, *dims).reshape(node.like.numel(), -1).tolist()
        rule = functools.partial(RULES[FOLDS[node.name]], self.p, kind)
        found = [functools.reduce(rule, [self.p.of(numbers[n], kind) for n in x]) for x in groups]
        return [self.p("div", x, len(groups[0])) for x in found] if node.name == "mean" else found

    def wrapped(self, x: Register, node: Node) -> Register:
        """Integers of 8 and 16 bits wrap around as torch's do."""
        if node.like.dtype not in _NARROW or x.kind != "i" or node.name == "where":
            return x
        first, mask = (self.p.constant(n, "i") for n in _NARROW[node.like.dtype])
        return self.p("sub", self.p("and", self.p("add", x, first), mask), first)

    def looked_up(self, node: Node, kind: str) -> list[Register]:
        table, indices = self.entry(node)
        is_float = kind == "f"
        item = (table, "float" if is_float else "int")
        if item not in self.tables:
            self.tables.append(item)
        found = []
        for place in product(*(range(n) for n in node.like.shape)):
            left = iter(place)
            at = [x or self.p.constant(next(left), "i") for x in indices]
            line: Line = ("load", self.tables.index(item), *(x.number for x in at))
            has_gradient = is_float and table.function is not _DETACH
            loaded = self.p.line(line, "f" if is_float else "i", has_gradient=has_gradient)
            found.append(self.p.of(loaded, kind))
        return found

    def entry(self, node: Node) -> tuple[Node, list[Any]]:
        """The table that a value is looked up in, and an index for each of its dimensions, None
        where there is none yet. Rows that captured indices choose are a table of their own."""
        has_rows = node.level == CAPTURED and any(x.like.dim() for x in node.inputs[1:])
        if has_rows or node.function is None or node.name not in LOOKUPS or node.level == CONSTANT:
            if node.level == ARGUMENT:
                what = f"score_mod calls {node.called} on a row of a table"
                raise Refused(what, node.place, _SINGLE)
            self.check(node)
            return node, [None] * node.like.dim()
        source: Node = node.args[0]
        table, found = self.entry(source)
        found = list(found)
        free = [d for d, x in enumerate(found) if x is None]
        if node.name == "select":
            chosen = {int(node.args[1]) % len(free): self.p.constant(node.args[2], "i")}
        else:
            given = node.args[1] if node.name == "index" else [node.args[1]]
            chosen = {d: self.index(x, node) for d, x in enumerate(given) if x is not None}
        if table.level == CAPTURED and table.like.is_floating_point():
            if node.name == "embedding" and node.args[2:] and node.args[2] >= 0:
                table = self.padded(table, free[0], node.args[2])
            if not node.has_gradient:
                table = self.detached(table)
        for d, x in chosen.items():
            n = table.like.size(free[d])
            if x.value is not None and not -n <= x.value < n:
                what = f"score_mod looks up index {x.value} of {n}"
                raise Refused(what, node.place, f"{-n} to {n - 1} is expected")
            found[free[d]] = x
        return table, found

    def detached(self, table: Node) -> Node:
        if table.function is _DETACH:
            return table
        made = Node(table.like, CAPTURED, table.place, _DETACH, (table,))
        return self.derived.setdefault((table,), made)

    def padded(self, table: Node, dim: int, padding_idx: int) -> Node:
        """The same numbers, of which those at `padding_idx` get no gradient."""
        sizes = table.like.shape[dim:]
        at = (torch.arange(sizes[0]) == padding_idx).view(-1, *[1] * (len(sizes) - 1))
        given = (Node(at, CONSTANT, table.place), self.detached(table), table)
        made = Node(table.like, CAPTURED, table.place, torch.ops.aten.where.self, given)
        return self.derived.setdefault((table, dim, padding_idx), made)

    def index(self, x: Node, node: Node) -> Register:
        if x.like.dim() or self.kind(x) != "i":
            what = f"score_mod looks up at {x.like.dtype}, {list(x.like.shape)}"
            raise Refused(what, node.place, "an integer, [], is expected for each index")
        return self.numbers(x)[0]

    def kind(self, node: Node) -> str:
        if node.like.dtype not in _KINDS:
            wanted = "float32, float64, bfloat16, float16, integers and bool are expected"
            raise Refused(f"score_mod computes with {node.like.dtype}", node.place, wanted)
        return _KINDS[node.like.dtype]

    def check(self, node: Node) -> None:
        self.kind(node)
        x = self.captured.get(node)
        if x is not None and (x.device.type != "cpu" or x.layout != torch.strided):
            what = f"score_mod captures {name_of(x, self.function)} on {x.device}, {x.layout}"
            raise Refused(what, node.place, "a dense tensor on the CPU is expected")
