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
from case import HALVES, compute_dtype
from errors import distance, rms, same_bits, size_of
from formula import PLAIN
from rounding import Noisy, Nudge

import qkv

# Of 100,000 calls (seed 3000000, four instruction sets of a Zen 4) none had a right result further
# off than this times its yard.
TIMES = 12.0
ROUNDINGS = 4.0
# Numbers that float32 has no normal numbers for may be 0, and so may their products with others.
NOTHING = 1e-30
# Of one draw alone, a tensor of few numbers may be right by luck. What fails beside the first two
# draws is held against more of them.
NOISES, MOST_NOISES = 2, 16
SEED = 77  # of the noise


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


def hold_bits(case, ours, threads=(3, 7)):
    """On any number of threads, and where qkv is reproducible on any instruction set."""
    isa = qkv.active_isa()
    others = [x for x in qkv.supported_isas() if x != isa] if qkv.is_reproducible() else []
    try:
        for where, n in [*((isa, n) for n in threads), *((other, 1) for other in others)]:
            qkv.set_isa(where)
            for name, x in case.ours(n).items():
                if case.call.composed and name.startswith(("second", "tangent")):
                    continue
                if not same_bits(x, ours[name]):
                    what = f"differs between {isa} with 1 thread and {where} with {n}"
                    raise Failure(name, what, threads=n)
    finally:
        qkv.set_isa(isa)


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
        noisy = Noisy(case.call.dtype, seed, rounded_lse, words="k_scale" in case.values)
        yield case.formula(dtype, noisy, more)
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
    for seed in range(SEED + NOISES, SEED + MOST_NOISES + 1):
        try:
            verdicts = judge(ours, truth, yards, call.dtype)
            break
        except Failure:
            if seed == SEED + MOST_NOISES:
                raise
            yards += noise(case, [seed], more, rounded_lse)
    if not call.torchs:
        hold_bits(case, ours, threads)
    return verdicts
