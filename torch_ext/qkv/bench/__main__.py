"""python -m qkv.bench: the command line."""

import statistics
import sys

import torch

from qkv.bench import machine, threads
from qkv.bench.command import make_parser
from qkv.bench.measure import measure, quartiles
from qkv.bench.passes import DIRECTIONS, Passes
from qkv.bench.shapes import GRID, SPELLING, Shape, choose

DESCRIPTION = """\
Times qkv's attention against torch's scaled_dot_product_attention in one process, turn by turn,
after checking both against float64.

Shares are of what this run measures: of the fused multiply-adds (FMA) of the instruction set in
use, or in bfloat16 of its vdpbf16ps (avx512bf16) or tdpbf16ps (amx); with one query a head of the
memory's bandwidth, at which keys and values are read. A causal shape counts half of its FLOPs,
backward 2.5 times forward's. Behind times torch's speed stands the interquartile range."""
TITLES = ("shape", "B×Hq/Hkv×L×S×D", "pass", "ms", "torch's ms", "× torch (IQR)", "rate", "share")
ROW = "{:<14} {:<28} {:<8} {:>8} {:>10} {:>14} {:>14} {:>6}"


def main(argv=None):
    """Returns the exit status: 0, or 1 where an answer was wrong. Bad arguments exit with 2."""
    epilog = f"SHAPE is a name ({', '.join(GRID)}) or {SPELLING}"
    parser = make_parser("qkv.bench", DESCRIPTION, epilog)
    args = parser.parse_args(argv)
    named = {name: (name, shape) for name, shape in GRID.items()}
    try:
        chosen = choose(args.shapes, named, lambda text: (text, Shape.parse(text)))
    except ValueError as error:
        parser.error(str(error))
    if args.threads:
        torch.set_num_threads(args.threads)
    dtype = getattr(torch, args.dtype or "float32")
    peak, ratios = machine.rates(dtype), {direction: [] for direction in DIRECTIONS}
    print(*machine.lines(machine.describe([dtype]), peak), "", sep="\n")
    if said := threads.warning():
        print(f"warning: {said}", file=sys.stderr)
    say(*TITLES)
    for name, shape in chosen:
        passes = Passes(shape, dtype)
        try:
            passes.check(name)
        except AssertionError as error:
            print(f"refused to time a wrong answer: {error}", file=sys.stderr)
            return 1
        for direction in DIRECTIONS:
            found = measure(passes.timed(direction), args.seconds, args.repeats)["samples_s"]
            cells, ratio = row(shape, dtype, direction, found, peak)
            say(name, spelled(shape), direction, *cells)
            ratios[direction] += [] if shape.is_decode else [ratio]
    for direction in DIRECTIONS:
        if ratios[direction]:
            mean = f"{statistics.geometric_mean(ratios[direction]):.2f}"
            say("geometric mean", "", direction, "", "", mean, "", "")
    return 0


def row(shape, dtype, direction, samples, peak):
    """(the last five cells, how many times torch's speed). samples: {"qkv": seconds, "torch":
    seconds}, turn by turn."""
    ratio = quartiles([y / x for x, y in zip(samples["qkv"], samples["torch"], strict=True)])
    ours, theirs = (statistics.median(samples[name]) for name in ("qkv", "torch"))
    if not shape.is_decode:
        rate, best, unit = shape.flops(direction) / ours / 1e9, peak["gflops"], "GFLOP/s"
    else:
        rate = shape.cache_elements * dtype.itemsize / ours / 1e9
        best, unit = peak["read_gbs"], "GB/s"
    is_known = not shape.is_decode or direction == "forward"
    of_best = (f"{rate:.4g} {unit}", f"{rate / best:.0%}") if is_known else ("", "")
    times = (f"{1e3 * ours:.4g}", f"{1e3 * theirs:.4g}")
    return (*times, f"{ratio['median']:.2f} ({ratio['iqr']:.2f})", *of_best), ratio["median"]


def say(*cells):
    print(ROW.format(*cells).rstrip(), flush=True)


def spelled(shape):
    sizes = str(shape).replace("x", "×")
    return f"{sizes[:-1]} causal" if shape.is_causal else sizes


if __name__ == "__main__":
    sys.exit(main())
