#!/usr/bin/env python
"""Trains a GPT on a context that is too long for the memory of one process, cut over four.

Each process holds a shard of the bytes, of their positions and of their labels, and a whole model;
in qkv.distributed.ring_attention the shards see each other, and gradients are summed at the end of
a step. A limit of the operating system (RLIMIT_DATA) is each process's memory: one process alone
fails with it, and trains a shorter context, which fits, to the same losses. The model and its data
are those of examples/gpt. It needs matplotlib.

    torchrun --standalone --nproc-per-node=4 examples/long_context.py
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import qkv
import qkv.distributed as over_ranks
from arguments import make_parser
from gpt.data import load_corpus, sample_batch
from gpt.model import GPT, ModelConfig

UNLIMITED = 0
SHORT, SHORT_STEPS = 2048, 12  # bytes, of which one process holds the context


def memory(field: str) -> int:
    """Bytes, by the name that /proc/self/status has for them."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) * 1024


def limit_memory(mebibytes: int) -> None:
    """So much beyond what this process has. What counts is memory that it may write and shares
    with no other, whether it is used or not."""
    _, most = resource.getrlimit(resource.RLIMIT_DATA)
    limit = most if mebibytes == UNLIMITED else memory("VmData") + mebibytes * 2**20
    resource.setrlimit(resource.RLIMIT_DATA, (limit, most))


def count_waiting() -> list[float]:
    """A list of one number: the seconds that this process spends, from now on, in waiting for what
    other processes send or take, with nothing else to do."""
    spent, wait = [0.0], dist.Work.wait

    def timed(work, *args):
        start = time.perf_counter()
        try:
            return wait(work, *args)
        finally:
            spent[0] += time.perf_counter() - start

    dist.Work.wait = timed
    return spent


def train(text: Tensor, context: int, steps: int, seed: int, is_alone: bool) -> list[float]:
    """The loss before each step, in nats a byte. All processes draw the same bytes and the same
    first weights, and keep their shards of the bytes."""

    def cut(x: Tensor, dim: int) -> Tensor:
        return x if is_alone else over_ranks.shard(x, dim)

    attention = qkv.attention if is_alone else over_ranks.ring_attention
    torch.manual_seed(seed)
    model = GPT(ModelConfig(layers=2, heads=2, head_dim=32, context=context), attention)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.8, 0.95))
    table, losses = cut(model.rotary, 0), []  # positions are those in the whole context
    for step in range(steps):
        tokens, targets = sample_batch(text, 1, context, seed * 1_000_003 + step)
        logits = model(cut(tokens, 1), table)
        loss = F.cross_entropy(logits[0], cut(targets, 1)[0], reduction="sum") / context
        optimizer.zero_grad()
        loss.backward()
        total = loss.detach()
        if not is_alone:  # the loss of all bytes is the sum of the shards'; so are its gradients
            for x in (total, *(p.grad for p in model.parameters())):
                dist.all_reduce(x)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(total.item())
        if not is_alone and dist.get_rank() == 0 and step % 4 == 0:
            print(f"{context} bytes, step {step:3}: loss {losses[-1]:.3f}", flush=True)
    return losses


def measure(text: Tensor, context: int, steps: int, args: argparse.Namespace) -> dict:
    """train(), and what it took of this process; or the error, if that is alone."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak restarts from what is resident now
    before, waited, start = memory("VmRSS"), count_waiting(), time.perf_counter()
    try:
        losses = train(text, context, steps, args.seed, args.alone)
    except (MemoryError, RuntimeError) as error:
        if not args.alone:
            raise
        return {"error": str(error).splitlines()[0]}
    seconds = time.perf_counter() - start
    return {
        "losses": losses,
        "tokens/s": steps * context / seconds,
        "MiB": (memory("VmHWM") - before) / 2**20,
        "waiting": waited[0] / seconds,
    }


def run_alone(args: argparse.Namespace, context: int, steps: int, limit: int) -> dict:
    """measure() in a process of its own that knows of no others."""
    options = {"context": context, "steps": steps, "limit": limit, "seed": args.seed}
    command = [sys.executable, __file__, "--alone", *(f"--{k}={v}" for k, v in options.items())]
    return json.loads(subprocess.check_output(command))


def report(args: argparse.Namespace, limited: dict, free: dict, short: list, ranks: list) -> None:
    """limited, free: of one process. short: of the shorter context, on one process and on all."""
    if "error" not in limited:
        raise SystemExit(f"--limit: one process can hold {args.context} bytes in {args.limit} MiB")
    print(f"one process, {args.context} bytes, {args.limit} MiB: {limited['error']}")
    off = max(abs(a - b) / a for a, b in zip(*(x["losses"] for x in short), strict=True))
    print(
        f"{SHORT} bytes, {SHORT_STEPS} steps, on one process and on {len(ranks)}: losses "
        f"differ by {off:.1e} of themselves at most"
    )
    print(f"{args.context} bytes{'tokens/s':>22}{'peak, MiB':>11}{'waiting':>9}")
    for n, rank in enumerate(ranks):
        print(f"rank {n:<22}{rank['tokens/s']:11.0f}{rank['MiB']:11.1f}{rank['waiting']:9.0%}")
    print(f"one process, no limit      {free['tokens/s']:11.0f}{free['MiB']:11.1f}")

    limit_memory(UNLIMITED)  # of what has been measured
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3.8), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.plot(ranks[0]["losses"], color="#1b6ca8", label=f"{args.context} bytes, all processes")
    left.plot(short[1]["losses"], color="#d1612a", label=f"{SHORT} bytes, all processes")
    left.plot(short[0]["losses"], "ko", mfc="none", ms=4, label=f"{SHORT} bytes, one process")
    left.set(xlabel="step", ylabel="nats a byte", title="Loss")
    names = [f"rank {n}\nwaits {rank['waiting']:.0%}" for n, rank in enumerate(ranks)]
    peaks = [process["MiB"] for process in (*ranks, free)]
    right.bar([*names, "one process,\nno limit"], peaks, color=["#1b6ca8"] * len(ranks) + ["0.7"])
    right.axhline(args.limit, color="#d1612a", ls="--", lw=1.5, label="limit")
    right.set(ylabel="MiB", title=f"Memory at its peak, {args.context} bytes")
    for axes in (left, right):
        axes.legend(frameon=False)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(args.picture, dpi=130)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = make_parser(__doc__, steps=30, picture="long_context.png")
    parser.add_argument("--context", type=int, default=16384, help="bytes (default: 16384)")
    parser.add_argument("--limit", type=int, default=128, help="MiB a process (default: 128)")
    parser.add_argument("--alone", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    size = int(os.environ.get("WORLD_SIZE", 0))
    if not size and not args.alone:
        parser.error(f"start it by: {__doc__.splitlines()[-1].strip()}")
    if not args.alone and (args.context % (2 * size) or SHORT % (2 * size)):
        parser.error(f"--context: expected, as {SHORT}, a multiple of twice the {size} processes")
    return args


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    text, alone = load_corpus().train, []
    if not args.alone:
        dist.init_process_group("gloo")
        if dist.get_rank() == 0:
            long = [run_alone(args, args.context, 1, limit) for limit in (args.limit, UNLIMITED)]
            alone = [*long, run_alone(args, SHORT, SHORT_STEPS, args.limit)]
        dist.barrier()
    train(text, 64, 1, args.seed, args.alone)  # starts threads and connects the processes
    limit_memory(args.limit)
    if args.alone:
        print(json.dumps(measure(text, args.context, args.steps, args)))
        return
    short = measure(text, SHORT, SHORT_STEPS, args)
    ranks: list[dict] = [{}] * dist.get_world_size()
    dist.all_gather_object(ranks, measure(text, args.context, args.steps, args))
    if dist.get_rank() == 0:
        report(args, *alone[:2], [alone[2], short], ranks)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
