"""Rows of tables, such as places in space, as single numbers: see `unroll`."""

from itertools import product
from typing import Any

import torch

from qkv._recorded import ARGUMENT, CAPTURED, CONSTANT, Node, Recording, replaced
from qkv._score_function.instructions import RULES

_aten = torch.ops.aten
FOLDS: dict[str, Any] = {
    "sum": _aten.add.Tensor,
    "mean": _aten.add.Tensor,
    "prod": _aten.mul.Tensor,
    "amax": _aten.maximum.default,
    "amin": _aten.minimum.default,
}
_VIEWS = ("view", "_unsafe_view", "unsqueeze", "squeeze", "alias", "detach", "select")
_MOST = 32  # numbers of a row, each of which has an instruction for all that is done with it


def unroll(recording: Recording) -> None:
    """What is computed with short rows, such as `(place[query] - place[key]).square().sum()`, is
    computed with their numbers. What has no rule here stays, for `lower` to refuse."""
    of = _Rows()
    for node in recording.nodes:
        if node.level == ARGUMENT:
            of.unroll(node)
    recording.nodes[:] = of.nodes


class _Rows:
    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.known: dict[Node, list[Node]] = {}  # the numbers of a row, in order

    def unroll(self, node: Node) -> None:
        rows = [x for x in node.inputs if x.like.dim()]
        found: list[Node] | None = None
        if any(x.level == ARGUMENT and 0 < x.like.numel() <= _MOST for x in rows):
            found = self.computed(node, rows)
        if found is not None and not node.like.dim():
            last = found[0]
            node.function, node.args, node.kwargs = last.function, last.args, last.kwargs
        elif found is not None:
            self.known[node] = found
        self.nodes.append(node)

    def computed(self, node: Node, rows: list[Node]) -> list[Node] | None:
        if node.like.numel() > _MOST:
            return None
        if node.name in FOLDS:
            return self.folded(node)
        if node.name in _VIEWS and (node.name != "select" or rows[0] in self.known):
            order = node.function(self.order(rows[0]), *node.args[1:]).flatten().tolist()
            return [self.new(node, _aten.alias.default, self.numbers(rows[0])[n]) for n in order]
        if node.name not in RULES:
            return None
        numbers = {x: self.numbers(x) for x in rows}
        order = {x: self.order(x).expand(node.like.shape).flatten().tolist() for x in rows}
        found = []
        for n in range(node.like.numel()):
            one = lambda x, n=n: numbers[x][order[x][n]] if x in numbers else x  # noqa: E731
            args, kwargs = replaced((node.args, node.kwargs), one)
            found.append(self.new(node, node.function, *args, **kwargs))
        return found

    def folded(self, node: Node) -> list[Node]:
        source = node.args[0]
        numbers, order = self.numbers(source), self.order(source)
        given = node.args[1] if len(node.args) > 1 else None
        dims = [given] if isinstance(given, int) else given or range(order.dim())
        dims = [d % order.dim() for d in dims]
        rest = [d for d in range(order.dim()) if d not in dims]
        found = []
        for group in order.permute(*rest, *dims).reshape(node.like.numel(), -1).tolist():
            total = numbers[group[0]]
            for n in group[1:]:
                total = self.new(node, FOLDS[node.name], total, numbers[n])
            if node.name == "mean":
                total = self.new(node, _aten.div.Tensor, total, len(group))
            found.append(self.new(node, _aten.alias.default, total))
        return found

    @staticmethod
    def order(row: Node) -> torch.Tensor:
        return torch.arange(row.like.numel()).view(row.like.shape)

    def numbers(self, row: Node) -> list[Node]:
        if row not in self.known and row.level == CONSTANT:
            self.known[row] = [Node(x, CONSTANT, row.place) for x in row.like.flatten()]
        elif row not in self.known:
            places = product(*(range(n) for n in row.like.shape))
            at = [[Node(torch.tensor(n), CONSTANT, row.place) for n in place] for place in places]
            self.known[row] = [self.new(row, _aten.index.Tensor, row, x) for x in at]
        return self.known[row]

    def new(self, of: Node, function: Any, *args: Any, **kwargs: Any) -> Node:
        """A node that stands for a part of another one."""
        like = torch.zeros((), dtype=of.like.dtype)
        made = Node(like, of.level, of.place, function, args, kwargs)
        made.called, made.has_gradient = of.called or str(of.function), of.has_gradient
        if of.level != CAPTURED:
            self.nodes.append(made)
        return made
