"""Score functions in what torch.compile traces: see `score_program`. Imported while it traces."""

import re
from collections.abc import Callable
from typing import Any, cast

import torch
from torch._dynamo.exc import unimplemented
from torch._dynamo.variables import builder, higher_order_ops
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.lists import TupleVariable
from torch._ops import HigherOrderOperator
from torch._subclasses import FakeTensor

from qkv._recorded import Node, Refused
from qkv._score_function.arguments import program_of
from qkv._score_function.cache import lowered
from qkv._score_function.lower import Lowered

_aten = torch.ops.aten
_NOT_INT32 = "score_mod: a captured tensor has others in it, but numbers of int32 are expected"
_program_of: Any = cast("Any", torch._dynamo.disable)(program_of)


class ScoreProgramOf(HigherOrderOperator):
    """(text, known, tables, indices) of a score function and a query. It is in no graph: the text
    is a constant of what is traced, and the tables are made of what the function captures. It is
    called after a graph break alone."""

    def __init__(self) -> None:
        super().__init__("qkv_score_program")

    def __call__(self, score_mod: Callable[..., Any], query: torch.Tensor) -> Any:
        return _program_of(score_mod, query)


class _Variable(higher_order_ops.TorchHigherOrderOperatorVariable):
    _HOP_NAME = "qkv.flex_attention"
    _ALLOW_FALLBACK_TO_EAGER = True  # where errors are those of the function itself

    def _call_function(self, tx: Any, args: Any, kwargs: Any) -> VariableTracker:
        score_mod, query = args
        floating = torch.float64 if query.dtype == torch.float64 else torch.float32
        graph, captured = _graph_of(self, tx, score_mod, query, floating)
        fakes = [_stand_in(proxy.node.meta["example_value"]) for proxy in captured]
        lines = _Lines(graph, floating)
        try:
            program, found = lowered(
                lambda *arguments: lines.run(*arguments, *fakes), floating, lambda: lines.line
            )
        except Refused as error:
            unimplemented(
                gb_type="qkv.flex_attention", context="score_mod", explanation=str(error), hints=[]
            )
        proxies = [captured[next(n for n, y in enumerate(fakes) if y is x)] for x in found]
        text, known = (VariableTracker.build(tx, x) for x in (program.text, tuple(program.known)))
        return TupleVariable([text, known, *_tables(tx, program, proxies)])


class _Lines(torch.fx.Interpreter):
    """Knows the line of the user that each node of the graph comes from."""

    line = ("score_mod", "?", 0)

    def __init__(self, graph: Any, floating: torch.dtype) -> None:
        super().__init__(graph)
        self.floating = floating

    def call_method(self, target: Any, args: Any, kwargs: Any) -> Any:
        """A number of Python's that has changed, as an attribute, is an item of a tensor that
        torch.compile makes; it is looked up instead."""
        if target == "item" and args[0].dtype == torch.float64:
            return args[0].to(self.floating)
        return super().call_method(target, args, kwargs)

    def run_node(self, n: torch.fx.Node) -> Any:
        found = re.findall(r'File "(.*)", line (\d+), in (.*)', n.stack_trace or "")
        if found:
            file, line, name = found[-1]
            self.line = (name, file, int(line))
        return super().run_node(n)


def _stand_in(x: Any) -> Any:
    """With numbers in place of symbols: tables have the sizes that they have now."""
    if not isinstance(x, torch.Tensor):
        return float(x) if isinstance(x, (float, torch.SymFloat)) else int(x)
    return torch.zeros((), dtype=x.dtype).expand([int(n) for n in x.shape])


def _graph_of(
    of: Any, tx: Any, score_mod: VariableTracker, query: Any, floating: torch.dtype
) -> tuple[Any, list[Any]]:
    """The function as a graph, and what it captures. floating: of the score."""
    from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

    def scalar(**options: Any) -> VariableTracker:
        given = {name: VariableTracker.build(tx, x) for name, x in options.items()}
        return query.call_method(tx, "new_empty", [VariableTracker.build(tx, [])], given)

    with higher_order_ops.discard_graph_changes(tx):
        score = scalar(dtype=floating, requires_grad=query.requires_grad)
        arguments = [score, *(scalar(dtype=torch.int32) for _ in range(4))]
    with TransformGetItemToIndex():
        _, graph, captured = higher_order_ops.speculate_subgraph(
            tx, score_mod, arguments, {}, description=of._HOP_NAME, source_target=of.value,
            set_subgraph_inputs="flatten_manual",
            # The graph is read, and never run: it may return its score, change it, or capture views
            # of one tensor. Since torch 2.15 each of these has to be asked for.
            supports_aliasing=True, supports_input_mutation=True,
        )  # fmt: skip
    return torch.fx.GraphModule(tx.output.nn_modules, graph), list(captured)


def _tables(tx: Any, program: Lowered, captured: list[Any]) -> list[VariableTracker]:
    """`Lowered.tables`, of the graph's own values."""

    def call(function: Any, *args: Any, **kwargs: Any) -> VariableTracker:
        proxy = tx.output.create_proxy("call_function", function, args, kwargs)
        return builder.wrap_fx_proxy(tx, proxy)

    value = program.values(captured, lambda *args, **kwargs: call(*args, **kwargs).as_proxy())

    def joined(nodes: list[Node], dtype: torch.dtype) -> VariableTracker:
        if not nodes:
            return VariableTracker.build(tx, None)
        # Of no samples, under vmap, a reshape can infer no size.
        flat = [call(_aten.flatten.using_ints, value(x)).as_proxy() for x in nodes]
        wide = call(_aten.cat.default, flat).as_proxy() if len(flat) > 1 else flat[0]
        found, like = call(_aten.to.dtype, wide, dtype), wide.node.meta["example_value"]
        # Samples of vmap and DTensors have no assertions.
        if like.dtype == torch.int64 and isinstance(like, FakeTensor):
            same = call(_aten.eq.Tensor, wide, found.as_proxy()).as_proxy()
            call(_aten._assert_async.msg, call(_aten.all.default, same).as_proxy(), _NOT_INT32)
        return found

    return [joined(program.floats, program.floating), joined(program.integers, torch.int32)]


score_program = ScoreProgramOf()
higher_order_ops._hop_name_to_variable_class[score_program.__name__] = _Variable
