"""Whether what a call returns is right: each result and each gradient by its own size.

    error   the largest distance from the truth, the formula in float64 of the same numbers
    yard    the largest of some errors: of the formula by torch's operators in the dtype that is
            computed in (float32 for half precision), of rounding.Noisy in it, and of the formula in
            float64 of numbers that are each off by a rounding of it
    size    the largest number of this very tensor, in the truth

A tensor is right if error <= TIMES * yard + ROUNDINGS * eps * size, eps being that of its dtype.
"""

import dataclasses
import math

import torch
from derivatives import derivatives, forward_mode
from errors import distance, rms, same_bits, size_of
from formula import PLAIN
from rounding import Noisy, Nudge

# Of 100,000 calls (seed 3000000, four instruction sets of a Zen 4) none had a right result further
# off than this times its yard.
TIMES = 12.0
ROUNDINGS = 4.0
# Numbers that float32 has no normal numbers for may be 0, and so may their products with others.
NOTHING = 1e-30
# Of one draw alone, a tensor of few numbers may be right by luck. What fails beside the first two
# draws is held against more of them.
NOISES, MORE_NOISES = 2, 16
SEED = 77  # of the yardstick's noise, the cotangents and the directions


@dataclasses.dataclass
class Failure(Exception):
    """name: of the tensor; place: its worst element; got, expected: there."""

    name: str
    what: str
    place: tuple = ()
    got: float = math.nan
    expected: float = math.nan
    allowed: float = math.nan
    threads: int = 0

    def __str__(self):
        return f"{self.name}: {self.what}"


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


HALVES = (torch.bfloat16, torch.float16)


def poison(values):
    """Fills memory that the call may get next with NaN, so that what it forgets to write shows."""
    sizes = {x.numel() for x in values if isinstance(x, torch.Tensor) and x.is_floating_point()}
    junk = [torch.full((n,), math.nan) for n in sizes for _ in range(2)]
    del junk


def hold_bits(case, ours, threads=(3, 7)):
    for n in threads:
        for name, x in case.ours(n).items():
            if case.call.composed and name.startswith(("second", "tangent")):
                continue
            if not same_bits(x, ours[name]):
                raise Failure(name, f"differs between 1 thread and {n}", threads=n)


@dataclasses.dataclass
class Verdict:
    """Of one tensor: error in units of what is allowed at TIMES = 1; and its root mean square error
    beside that of torch's operators, for the statistics."""

    name: str
    ratio: float
    ours: float
    theirs: float
    size: float


def judge_tensor(name, x, truth, yards, dtype):
    """Verdict; raises Failure."""
    if x.shape != truth.shape:
        raise Failure(name, f"shape {[*x.shape]}, expected {[*truth.shape]}")
    size = size_of(truth)
    info = torch.finfo(x.dtype)
    if size > 0.9 * info.max:
        return None
    error = distance(x, truth)
    yard = max(distance(y.to(x.dtype), truth) for y in yards)
    yard = yard if math.isfinite(yard) else size
    eps = max(info.eps, torch.finfo(compute_dtype(dtype)).eps)
    # An lse is the logarithm of a sum of numbers up to 1, which is rounded.
    terms = max(size, 1) if name == "lse" else size
    # An output that float16 has no number for is 0, and what is made of it is 0 in float32, too.
    least = max(i.smallest_normal * i.eps for i in (info, torch.finfo(dtype)))
    floor = ROUNDINGS * (eps * terms + least) + NOTHING
    allowed = TIMES * yard + floor
    if not error <= allowed:
        off = (x.double() - truth).abs().nan_to_num(nan=math.inf)
        off = off.masked_fill((x.double() == truth) | (x.isnan() & truth.isnan()), 0)
        place = torch.unravel_index(off.argmax(), off.shape)
        place = tuple(int(n) for n in place)
        got, expected = x[place].item(), truth[place].item()
        what = f"{got:.9g} at {[*place]}, expected {expected:.9g} within {allowed:.3g}"
        what += f" (off by {error:.3g}; yard {yard:.3g}; size {size:.3g})"
        raise Failure(name, what, place, got, expected, allowed)
    theirs = rms(yards[0].to(x.dtype), truth)
    return Verdict(name, (error - floor) / max(yard, 1e-300), rms(x, truth), theirs, size)


def judge(ours, truth, yards, dtype):
    verdicts = [
        judge_tensor(name, x, truth[name], [y[name] for y in yards], dtype)
        for name, x in ours.items()
        if x.is_floating_point()
    ]
    return [v for v in verdicts if v]


def fail(name, what):
    raise Failure(name, what)


def noise(case, seeds, more, rounded_lse):
    """The results of the formula with random errors, twice for each seed."""
    dtype = compute_dtype(case.call.dtype)
    for seed in seeds:
        yield case.formula(dtype, Noisy(case.call.dtype, seed, rounded_lse), more)
        nudge = Nudge(torch.finfo(dtype).eps, seed)
        yield case.formula(torch.float64, PLAIN, more, nudge)


def hold(case, threads=(3, 7), rounded_lse=False):
    """Makes the call and judges it: [Verdict]. Raises Failure."""
    call = case.call
    ours = case.ours(1)
    more = {}
    if "index" in ours:
        more = {"chosen": ours["index"]}
    if "k_scale_after" in ours:  # rounded to int8: which numbers these may be, call.check says
        more = {"after": ours, "k_scale": ours["k_scale_after"], "v_scale": ours["v_scale_after"]}
    truth = case.formula(torch.float64, PLAIN, more)
    if call.check:
        call.check(case, ours, fail)
    yards = [case.formula(compute_dtype(call.dtype), PLAIN, more)]
    yards += noise(case, range(SEED, SEED + NOISES), more, rounded_lse)
    if call.torchs and call.dtype in HALVES:  # torch rounds what lies between its operators, too
        yards.append(case.formula(call.dtype, PLAIN, more))
    try:
        verdicts = judge(ours, truth, yards, call.dtype)
    except Failure:
        yards += noise(case, range(SEED + NOISES, SEED + MORE_NOISES), more, rounded_lse)
        verdicts = judge(ours, truth, yards, call.dtype)
    if not call.torchs:
        hold_bits(case, ours, threads)
    return verdicts
