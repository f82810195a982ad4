"""A call made ready: what qkv returns, and what the formula does, with all derivatives."""

import math

import torch
from derivatives import derivatives, forward_mode

SEED = 77  # of the cotangents and the directions
HALVES = (torch.bfloat16, torch.float16)


def random_like(x, seed, offset=0.0):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(x.shape, generator=generator, dtype=torch.float64) + offset).to(x.dtype)


def compute_dtype(dtype):
    return torch.float64 if dtype == torch.float64 else torch.float32


def wide(x, dtype):
    """x, a tensor or anything else, in the dtype to compute in."""
    floating = isinstance(x, torch.Tensor) and x.is_floating_point()
    return x.detach().to(dtype) if floating else x


class Case:
    """A call that has been made ready: its tensors, and the random cotangents and directions."""

    def __init__(self, call):
        self.call, self.names = call, call.execute()
        self.values = call.arguments(self.names)
        self.leaves = {n: self.names[n] for n in call.used_leaves()}
        self.cotangents = None
        offset = 100.0 if "offset" in call.tags and call.dtype not in HALVES else 0.0
        self.offset = offset
        # Of the cotangent of each result, and of the direction of each leaf.
        self.seeds = {n: SEED + 1 + k for k, n in enumerate((*self.leaves, *call.results))}
        self.directions = {n: random_like(x, self.seeds[n]) for n, x in self.leaves.items()}

    def ready(self):
        """The case, with its cotangents."""
        self.ours(1)
        return self

    def product(self, leaves):
        found = self.names["call"](**leaves)
        found = (found,) if isinstance(found, torch.Tensor) else found
        return dict(zip(self.call.results, found, strict=True))

    def ours(self, threads):
        """What qkv returns, with so many threads."""
        torch.set_num_threads(threads)
        poison([*self.values.values()])
        if self.cotangents is None:
            with torch.no_grad():
                results = self.product({n: x.detach() for n, x in self.leaves.items()})
            self.cotangents = {
                n: random_like(results[n], self.seeds[n], self.offset) for n in self.call.cotangents
            }
            poison([*self.values.values()])
        arguments = (self.leaves, self.cotangents, self.directions, self.call.order)
        found = derivatives(self.product, *arguments)
        if self.call.order > 1 and self.call.jvp and self.leaves:
            found |= forward_mode(self.product, self.leaves, self.call.cotangents, self.directions)
        return found

    def formula(self, dtype, arithmetic, more, nudge=lambda x: x):
        """The same by the formula, of numbers to which `nudge` has been done."""
        torch.set_num_threads(1)
        cast = lambda group: {n: nudge(wide(x, dtype)) for n, x in group.items()}  # noqa: E731
        values = cast(self.values | more)
        names = [n for n in self.call.results]

        def f(leaves):
            return dict(zip(names, self.call.truth(values | leaves, arithmetic), strict=True))

        groups = map(cast, (self.leaves, self.cotangents, self.directions))
        found = derivatives(f, *groups, self.call.order)
        for n in self.call.cotangents:
            if f"second grad_{n}" in found:
                found[f"tangent {n}"] = found[f"second grad_{n}"]
        return found


def poison(values):
    """Fills memory that the call may get next with NaN, so that what it forgets to write shows."""
    sizes = {x.numel() for x in values if isinstance(x, torch.Tensor) and x.is_floating_point()}
    junk = [torch.full((n,), math.nan) for n in sizes for _ in range(2)]
    del junk
