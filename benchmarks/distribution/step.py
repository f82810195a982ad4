"""A ring's steps on two ranks, and whole calls, as things to time."""

from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from qkv.distributed._attention import ring_attention
from qkv.distributed._block import Ring, block_backward, block_forward, rows_of
from qkv.distributed._call import SCALARS
from qkv.distributed._exchange import Exchange, Return
from qkv.distributed._passes import merge
from qkv.distributed._plan import Block, Plan
from qkv.distributed._ranks import Ranks
from qkv.distributed._transport import Messages


class ForwardStep:
    """Some queries of this rank on keys of the other one. `compute` is what ring_attention does
    with them when they are here; `transport` brings them; `both` does this while the keys of a
    next step come."""

    phase = "forward"

    def __init__(self, rows: int, heads: int, head_dim: int, dtype: torch.dtype):
        ranks = Ranks(dist.group.WORLD, dist.get_rank(), 2)
        plan = Plan(2, rows // 2, 2 * rows, is_causal=True, positions=False)
        self.query, self.key, self.value = torch.randn(3, 1, heads, rows, head_dim).to(dtype)
        self.ring = Ring(ranks, plan, (1, heads), SCALARS | {"dropout_p": 0.0}, heads)
        self.exchange = Exchange((self.key, self.value), ranks, plan, 1, 1, self.phase)
        own, self.visit = self.exchange.visits  # all of the other rank's keys at once
        (self.block,) = self.visit.seen.blocks
        (self.own_block,) = own.seen.blocks
        self.output = torch.zeros(1, heads, rows, head_dim)
        self.lse = torch.zeros(1, heads, rows, dtype=torch.float64)
        self.facts = {"pass": self.phase, "rows": rows, "bytes": self.key_bytes}
        self.keys: list[Tensor] = []
        self.transport()

    @property
    def key_bytes(self) -> int:
        """Of keys and values of a rank: one of the two gets all of the other's, and every rank of a
        larger ring does in some steps."""
        return 2 * self.key.numel() * self.key.element_size()

    def start(self) -> None:
        self.arrivals = self.exchange.arrivals()
        next(self.arrivals)  # the first step's keys are here, and the second step's on their way

    def finish(self) -> None:
        _, arrived = next(self.arrivals)
        self.keys = list(arrived)
        next(self.arrivals, None)

    def transport(self) -> None:
        self.start()
        self.finish()

    def both(self) -> None:
        self.start()
        self.compute()
        self.finish()

    def compute(self) -> None:
        self.attend(self.keys, self.block)

    def compute_own(self) -> None:
        """The first step: causal, with as many pairs."""
        self.attend([self.key, self.value], self.own_block)

    def attend(self, tensors: list[Tensor], block: Block) -> None:
        keys, values = (x.float() for x in tensors)
        found = block_forward(self.query, keys, values, block, self.ring)
        rows = block.rows
        merge(rows_of(self.output, rows), rows_of(self.lse, rows, -1), *found)


class BackwardStep(ForwardStep):
    """The same of the backward pass, in which gradients of the step before go home, too."""

    phase = "backward"
    back: Return

    def __init__(self, rows: int, heads: int, head_dim: int, dtype: torch.dtype):
        self.home = list(torch.zeros(2, 1, heads, rows, head_dim))
        self.shares: list[Tensor] = []
        super().__init__(rows, heads, head_dim, dtype)
        self.facts["bytes"] += 2 * self.home[0].numel() * self.home[0].element_size()
        grad_output, grad_query = torch.randn(2, 1, heads, rows, head_dim)
        self.queries = {"query": self.query, "output": self.output, "lse": self.lse.float()}
        self.queries["grad_output"] = grad_output
        self.grads = {"query": grad_query}

    def start(self) -> None:
        super().start()
        columns = self.block.columns.size
        self.shares = self.shares or [x[..., :columns, :].contiguous() for x in self.home]
        self.back = self.exchange.send_back(self.visit, self.shares, self.home)

    def finish(self) -> None:
        super().finish()
        self.back.leaving.wait()
        self.received = self.back.coming.wait()

    def attend(self, tensors: list[Tensor], block: Block) -> None:
        keys = [x.float() for x in tensors]
        grads = self.grads | {"key": torch.zeros_like(keys[0]), "value": torch.zeros_like(keys[1])}
        block_backward(self.queries, keys, grads, block, self.ring)
        # Adds what another rank has sent before to the gradients of the own keys.
        Return(self.home, self.back.columns, Messages(self.received), Messages([])).finish()


class Whole:
    """ring_attention, forward and backward, of `rows` tokens a rank."""

    def __init__(
        self, method: Literal["ring", "heads"], group: dist.ProcessGroup | None, rows: int,
        heads: int, head_dim: int, dtype: torch.dtype,
    ):  # fmt: skip
        self.method: Literal["ring", "heads"] = method
        self.group = group
        inputs = torch.randn(3, 1, heads, rows, head_dim).to(dtype)
        self.inputs = [x.requires_grad_() for x in inputs.unbind()]
        self.grad_output = torch.randn(1, heads, rows, head_dim).to(dtype)
        ranks = dist.get_world_size(group)
        self.facts = {"method": method, "ranks": ranks, "tokens": ranks * rows}

    def __call__(self) -> None:
        query, key, value = self.inputs
        output = ring_attention(
            query, key, value, is_causal=True, method=self.method, group=self.group
        )
        torch.autograd.grad(output, self.inputs, self.grad_output)
