"""The time a model spends in its attention, measured from outside, the same way for any of them."""

from time import perf_counter

from torch import Tensor


class TimedAttention:
    """Wraps an attention function. `forward_seconds` and `backward_seconds` add up the wall-clock
    time of its calls and of the one node that they leave in the autograd graph: from just before
    that node runs to just after. On a CPU both run to their end before they return.
    """

    def __init__(self, attention):
        self.attention = attention
        self.reset()

    def reset(self) -> None:
        self.forward_seconds = self.backward_seconds = 0.0

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, **options) -> Tensor:
        start = perf_counter()
        output = self.attention(query, key, value, **options)
        self.forward_seconds += perf_counter() - start
        if output.requires_grad:
            self._time_backward(output.grad_fn, (query, key, value))
        return output

    def _time_backward(self, node, inputs) -> None:
        following = {edge for edge, _ in node.next_functions if edge is not None}
        if following != {tensor.grad_fn for tensor in inputs}:
            raise RuntimeError(f"attention: expected one autograd node, got more behind {node}")

        def before(_):
            node_started[0] = perf_counter()

        def after(*_):
            self.backward_seconds += perf_counter() - node_started[0]

        node_started = [0.0]
        node.register_prehook(before)
        node.register_hook(after)
