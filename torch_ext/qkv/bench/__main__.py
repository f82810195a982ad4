"""python -m qkv.bench: the command line."""

import sys

from .arguments import make_parser
from .command import command
from .grid import GRID

DESCRIPTION = """\
Times qkv's attention against torch's scaled_dot_product_attention in one process, turn by turn,
after checking both against float64.

Shares are of what this run measures: of the fused multiply-adds (FMA) of the instruction set in
use, or in bfloat16 of its vdpbf16ps (avx512bf16) or tdpbf16ps (amx); of the memory's bandwidth
where there is one query a head. A causal shape counts half of its FLOPs, backward 2.5 times
forward's. An error is the largest from float64, of the tensor that comes closest to its limit."""


def main(argv=None):
    suites = {GRID.name: GRID}
    parser = make_parser("qkv.bench", DESCRIPTION, suites)
    return command("qkv.bench", suites, parser, argv)


if __name__ == "__main__":
    sys.exit(main())
