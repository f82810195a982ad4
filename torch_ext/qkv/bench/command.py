"""What the command lines of qkv.bench and of benchmarks/ have in common."""

import argparse

DTYPES = ("float32", "float64", "bfloat16", "float16")
SECONDS = 2.0  # for each figure


def new_parser(package, description, epilog=None):
    """Whose texts are printed as they are."""
    return argparse.ArgumentParser(
        prog=f"python -m {package}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description=description,
        epilog=epilog,
    )


def make_parser(package, description, epilog, dtypes="float32"):
    """dtypes: those where --dtype does not say, for --help."""
    parser = new_parser(package, description, epilog)
    parser.add_argument("--shapes", metavar="SHAPE,...", help="see below; default: all names")
    parser.add_argument("--dtype", choices=DTYPES, help=f"default: {dtypes}")
    add_timing(parser, "figure")
    return parser


def add_timing(parser, what):
    """On how many threads, and for how long each `what` is measured."""
    parser.add_argument("--threads", type=positive(int), help="default: torch.get_num_threads()")
    length = parser.add_mutually_exclusive_group()
    length.add_argument(
        "--seconds",
        type=positive(float),
        default=SECONDS,
        help=f"for each {what}; default: {SECONDS:g}",
    )
    length.add_argument("--repeats", type=positive(int), help=f"this many for each {what} instead")


def positive(kind):
    def parse(text):
        try:
            value = kind(text)
        except ValueError:
            value = 0
        if not 0 < value < 2**31:  # threads are a C++ int, and seconds end
            raise argparse.ArgumentTypeError(
                f"'{text}', expected a positive {kind.__name__} below 2**31"
            )
        return value

    return parse
