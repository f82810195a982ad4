"""python -m benchmarks.distribution: how well attention over many hosts would use them.

Two ranks, with a core of this machine each, measure what one step of a ring takes: computing alone,
transport over loopback alone, and both at once. From these figures and a stated network follows the
time of causal training, forward and backward, of one attention layer on many hosts. What the model
says of two ranks is held against ring_attention itself.

Efficiency is the time that the operations of attention alone would take, divided evenly, over the
time that is predicted. docs/distributed.md derives the model.
"""

import argparse
import json
import os
from dataclasses import asdict
from pathlib import Path

import torch

from ..command import expect_folder, expect_modules
from .cost import Split, predict
from .figures import Core, Hosts, Layer, Link, Pass
from .fit import fit
from .table import grid, tables

DTYPES = ("float32", "bfloat16", "float16")


def main(argv: list[str] | None = None) -> None:
    parser = make_parser()
    args = parser.parse_args(argv)
    try:
        check(args)
    except ValueError as error:
        parser.error(str(error))
    run = json.loads(args.figures.read_text()) if args.figures else measured(args)
    run |= predictions(run, args)
    print(tables(run, "github" if args.markdown else "simple"))
    if args.json:
        args.json.write_text(json.dumps(run, indent=1) + "\n")
    if args.plot:
        from .plot import draw

        draw(run, args.plot)


def measured(args: argparse.Namespace) -> dict:
    """What this machine gives: figures of a core, and how they came about."""
    import qkv
    from qkv.env import cpu_model

    from .measure import measure

    cores, load = len(os.sched_getaffinity(0)), os.getloadavg()[0]
    found = measure(args.head_dim, getattr(torch, args.dtype))
    core = fit(found["samples"], Layer(**found["layer_measured"]))
    about = (
        f"{cpu_model()}, {min(2, cores)} of {cores} cores, {qkv.active_isa()}, {args.dtype}; "
        f"qkv {qkv.__version__}, torch {torch.__version__}; load {load:.1f} before"
    )
    return {"machine": about, **found, "core": asdict(core)}


def core_of(figures: dict) -> Core:
    """The Core of which these are the figures, as asdict() gives them."""
    return Core(
        Pass(**figures["forward"]),
        Pass(**figures["backward"]),
        Link(**figures["transport"]),
        figures["transport_cpu"],
    )


def predictions(run: dict, args: argparse.Namespace) -> dict:
    """{"checks", "layer", "hosts", "efficiency"}: of what was measured whole, and of many hosts."""
    core, small = core_of(run["core"]), Layer(**run["layer_measured"])
    checks = []
    for whole in run["whole"]:
        ranks = whole["ranks"]
        split = Split(ranks, 1) if whole["method"] == "heads" else Split(1, ranks)
        predicted = predict(small, whole["tokens"], split, Hosts(core))
        checks.append(whole | {"predicted": predicted})
    itemsize = getattr(torch, args.dtype).itemsize
    layer = Layer(args.heads, args.kv_heads, args.head_dim, itemsize)
    networks = {}
    for gigabits in args.network:
        link = Link(gigabits * 1e9 / 8, args.latency * 1e-6)
        name = f"{gigabits:g} Gbit/s, {args.latency:g} µs"
        networks[name] = grid(layer, Hosts(core, args.cores, args.scaling, link))
    hosts = {"cores": args.cores, "scaling": args.scaling}
    return {"checks": checks, "layer": asdict(layer), "hosts": hosts, "efficiency": networks}


def make_parser() -> argparse.ArgumentParser:
    summary, _, details = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.distribution",
        description=summary.partition(": ")[2],
        epilog=details,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--network", type=float, nargs="+", default=[10, 100], metavar="GBIT/S",
        help="between hosts, each way (default: 10 100)")  # fmt: skip
    add("--latency", type=float, default=20, metavar="MICROSECONDS", help="(default: 20)")
    add("--cores", type=int, default=32, help="of a host (default: 32)")
    add("--scaling", type=float, default=0.85,
        help="share of its cores' speed that a host has (default: 0.85)")  # fmt: skip
    add("--heads", type=int, default=32, help="(default: 32)")
    add("--kv-heads", type=int, default=8, help="(default: 8)")
    add("--head-dim", type=int, default=128, help="(default: 128)")
    add("--dtype", choices=DTYPES, default="bfloat16",
        help="of what is attended to; gradients of keys and values travel as float32 "
        "(default: bfloat16)")  # fmt: skip
    add("--figures", type=Path, metavar="FILE.json",
        help="predict from what --json wrote before, and measure nothing")  # fmt: skip
    add("--markdown", action="store_true", help="print markdown tables")
    add("--json", type=Path, metavar="FILE", help="write all figures")
    add("--plot", type=Path, metavar="FILE.png", help="draw them")
    return parser


def check(args: argparse.Namespace) -> None:
    """Raises ValueError; what cannot be written is better known before measuring."""
    for name in ("latency", "cores", "scaling", "heads", "kv_heads", "head_dim"):
        if not getattr(args, name) > 0:
            option = name.replace("_", "-")
            raise ValueError(f"--{option}: expected more than 0, got {getattr(args, name)}")
    if not all(gigabits > 0 for gigabits in args.network):
        raise ValueError(f"--network: expected more than 0, got {args.network}")
    if args.scaling > 1:
        raise ValueError(f"--scaling: expected 1 or less, got {args.scaling}")
    if args.heads % args.kv_heads:
        raise ValueError(f"--kv-heads: expected a divisor of {args.heads}, got {args.kv_heads}")
    if args.figures and not args.figures.is_file():
        raise ValueError(f"--figures: there is no file {args.figures}")
    for option, path in (("--json", args.json), ("--plot", args.plot)):
        expect_folder(option, path)
    expect_modules("tabulate", *(["matplotlib"] if args.plot else []))


if __name__ == "__main__":
    main()
