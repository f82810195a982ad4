"""python -m qkv.bench: the command line."""

import sys

from .command import chosen, confine, expect_folder, expect_modules, make_parser, measured, show
from .compare import earlier
from .grid import GRID, SHAPES
from .shapes import SPELLING

DESCRIPTION = """\
Times qkv's attention against torch's scaled_dot_product_attention in one process, turn by turn,
after checking both against float64.

Shares are of what this run measures: of the fused multiply-adds (FMA) of the instruction set in
use, or in bfloat16 of its vdpbf16ps (avx512bf16) or tdpbf16ps (amx); of the memory's bandwidth
where there is one query a head. A causal shape counts half of its FLOPs, backward 2.5 times
forward's. An error is the largest from float64, of the tensor that comes closest to its limit."""


def main(argv=None):
    """Returns the exit status: 0, or 1 where an answer was wrong. Bad arguments exit with 2."""
    argv = sys.argv[1:] if argv is None else argv
    epilog = f"SHAPE is a name ({', '.join(SHAPES)}) or {SPELLING}"
    parser = make_parser("qkv.bench", DESCRIPTION, epilog)
    args = parser.parse_args(argv)
    confine(parser, args.isa, "qkv.bench", argv)
    try:
        expect_folder("--json", args.json)
        expect_modules("tabulate", "tqdm")
        entries, dtypes, keys = chosen(GRID, args)
        then = earlier(args.compare, GRID, keys)
    except ValueError as error:
        parser.error(str(error))
    run = measured(GRID, entries, dtypes, args)
    if run is None:
        return 1
    show(run, GRID.tables(run), then, args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
