"""python -m benchmarks.peers: the command line."""

import contextlib
import os
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch

from qkv.bench import machine
from qkv.bench.measure import quartiles
from qkv.bench.threads import allowed
from qkv.testing import max_error

from .. import table, truth
from ..case import Case
from ..check import WrongAnswer
from ..command import choose_entries
from ..grid import GRID
from ..processes import ROOT, Failed, Process
from ..program import Program, add_dtype, dtypes_of

DESCRIPTION = """\
A forward pass of qkv.attention beside what other libraries have for CPUs: torch's SDPA and
FlexAttention, zentorch, ONNX Runtime, OpenVINO and JAX. Each has a process of its own, with the
same CPUs and as many threads, and all take turns, round by round. What is not torch's comes from
the environment that `make build/peers/ready` makes. Every answer is held against float64, and who
gives a wrong one is not timed. FlashAttention and xFormers have no kernel for CPUs, and IPEX is
archived for a torch that qkv does not know: none of them is tried."""
SHAPES = "vit-s,bert,base,long,llama,tiny"
ROUNDS = 9
# An error of more than so many roundings of the dtype, relative to the largest number, is none of
# rounding: OpenVINO, unless it is told not to, computes float32 in bfloat16 on a Zen 4, which is
# wrong by 1.5e-3 where this allows 1e-6.
ROUNDINGS = 16
WAYS = "benchmarks.peers.ways"
OWN = {"qkv": f"{WAYS}:qkv", "SDPA": f"{WAYS}:sdpa", "FlexAttention": f"{WAYS}:flex_attention"}
PEERS = {
    "zentorch": f"{WAYS}:zentorch",
    "ONNX Runtime": f"{WAYS}:onnxruntime",
    "ONNX Runtime's own": f"{WAYS}:onnxruntime_own",
    "OpenVINO": f"{WAYS}:openvino",
    "JAX": f"{WAYS}:jax",
}  # of the other environment


def add_arguments(parser):
    parser.add_argument("--shapes", metavar="SHAPE,...", default=SHAPES, help=f"default: {SHAPES}")
    add_dtype(parser)
    parser.add_argument("--environment", type=Path, default=ROOT / "build/peers", metavar="DIR")


def prepare(args):
    dtypes = dtypes_of(args)
    entries = choose_entries(GRID, args.shapes)
    for entry in entries:
        if entry.shape.is_causal and entry.shape.seqlen_q != entry.shape.seqlen_k:
            raise ValueError(f"--shapes: {entry} is causal, expected as many keys as queries")
    python = args.environment / "bin" / "python"
    if not python.exists():
        raise ValueError(f"--environment: there is no {python}; `make build/peers/ready` makes it")
    return dtypes, lambda: run_peers(entries, dtypes, python, args)


def run_peers(entries, dtypes, python, args):
    """The results. Raises WrongAnswer."""
    from tqdm import tqdm  # which only a run needs

    cpus = sorted(allowed())[: torch.get_num_threads()]
    with processes(python, cpus) as ways, tempfile.TemporaryDirectory() as folder:
        about, absent = asked(ways, "load")
        cases = [(entry, dtype) for dtype in dtypes for entry in entries]
        results = []
        for entry, dtype in tqdm(cases, unit="shape"):
            able = {name: ways[name] for name in about}
            time = timed(able, Case(entry, dtype, with_gradients=False), Path(folder), args)
            for name in time.keys() & about.keys():
                time[name]["version"] = about[name]
            time["skipped"] = absent | time["skipped"]
            described = {"name": entry.name, "shape": str(entry.shape)}
            results.append(described | {"dtype": machine.name_of(dtype), "forward": time})
    return results


@contextlib.contextmanager
def processes(python, cpus):
    """{name: Process} of every way."""
    environment = os.environ | {"OMP_NUM_THREADS": str(len(cpus))}
    found = {}
    with contextlib.ExitStack() as stack:
        for name, way in (OWN | PEERS).items():
            command = ["benchmarks.peers.worker", way, ",".join(map(str, cpus))]
            program = sys.executable if name in OWN else str(python)
            found[name] = Process(name, command, environment, program)
            stack.callback(found[name].end)
        yield found


def asked(ways, *request):
    """({name: answer}, {name: why there is none}), one process after the other."""
    answers, failed = {}, {}
    for name, process in ways.items():
        try:
            answers[name] = process.ask(*request)
        except Failed as error:
            failed[name] = str(error).removeprefix(f"{name}: ")
    return answers, failed


def timed(ways, case, folder, args):
    """{name: {"seconds", "samples_s", "error", "ratio": its time over ours, round by round},
    "skipped": {name: why}}. Raises WrongAnswer where the wrong answer is ours."""
    tensors = {name: case.inputs[name] for name in ("query", "key", "value")}
    np.savez(folder / "inputs.npz", **{name: x.float().numpy() for name, x in tensors.items()})
    expected = truth.answers(case)["output"]
    limit = ROUNDINGS * torch.finfo(case.dtype).eps * expected.abs().max().item()
    able, errors, skipped = {}, {}, {}
    for name, process in ways.items():
        output = folder / f"{name}.npy"
        how = (machine.name_of(case.dtype), case.inputs["is_causal"])
        _, failed = asked({name: process}, "prepare", str(folder / "inputs.npz"), str(output), *how)
        if failed:
            skipped |= failed
            continue
        errors[name] = max_error(torch.from_numpy(np.load(output)), expected)
        if errors[name] <= limit:
            able[name] = process
        else:
            skipped[name] = f"wrong by {errors[name]:.1e}, at most {limit:.1e} is accepted"
    if "qkv" in skipped:
        raise WrongAnswer(f"{case.entry}: qkv: {skipped['qkv']}")
    samples = rounds(able, args)
    found = {}
    for name, taken in samples.items():
        pairs = zip(taken, samples["qkv"], strict=True)
        found[name] = {
            "seconds": quartiles(taken),
            "samples_s": taken,
            "error": errors[name],
            "ratio": quartiles([theirs / ours for theirs, ours in pairs]),
        }
    return found | {"skipped": skipped}


def rounds(ways, args):
    """{name: seconds of a call in each round}. Every other round goes backwards, so that a drift
    hits all alike."""
    samples = {name: [] for name in ways}
    for index in range(args.repeats or ROUNDS):
        for name in [*ways][:: -1 if index % 2 else 1]:
            samples[name].append(ways[name].ask("time", args.seconds / ROUNDS))
    return samples


def tables(run):
    """One for each dtype: our time, and how many times as fast as each of the others we are."""
    found = []
    for dtype in dict.fromkeys(result["dtype"] for result in run["results"]):
        results = [r for r in run["results"] if r["dtype"] == dtype]
        ways = dict.fromkeys(
            name for r in results for name in r["forward"] if name not in ("qkv", "skipped")
        )
        found.append((f"In {dtype}, {versions(results)}:", [row(r, ways) for r in results]))
    return found


def versions(results):
    times = [x for r in results for name, x in r["forward"].items() if name != "skipped"]
    return "; ".join(dict.fromkeys(x["version"] for x in times))


def row(result, ways):
    time = result["forward"]
    ratios = {
        f"× {name}\n(IQR)": table.ratio(time.get(name, {}), with_spread=True) for name in ways
    }
    return table.of_shape(result) | {"ms": table.milliseconds(time, "qkv")} | ratios


main = Program(
    "peers", DESCRIPTION, add_arguments, prepare, tables, "way and shape", "forward"
).main

if __name__ == "__main__":
    sys.exit(main())
