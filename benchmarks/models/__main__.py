"""python -m benchmarks.models: the command line."""

import copy
import sys

import torch
from torch import nn

import qkv.integrations.transformers
from qkv.bench import machine
from qkv.bench.measure import measure, quartiles

from .. import table
from ..program import Program, add_dtype, dtypes_of
from .answers import ROUNDINGS, ROUNDINGS_OF_LINEAR, answers, check
from .parts import ATTENTION, PARTS, shares
from .steps import MODELS, make_step

DESCRIPTION = """\
Whole steps of transformers' models, of the sizes that they are known by, with random weights and
without padding: attn_implementation="sdpa" beside "qkv", turn by turn. Training is forward, loss
and backward without an optimizer, with the dropout of the model's config and without it; in
bfloat16 it is autocast. Forward and a token behind a cache have their weights in bfloat16. Both
models are held against float64 before they are timed, gradients included. The shares are of one
step under torch's profiler: attention is transformers' interface to it, linear all linear layers
and convolutions. It takes ten minutes of two cores."""
LITTLE = 1.1
PATIENCE_SECONDS = 30  # for which a slow step is repeated


def add_arguments(parser):
    parser.add_argument("--models", metavar="NAME,...", help=f"of {', '.join(MODELS)}")
    parser.add_argument(
        "--linear", action="store_true", help="ours by qkv.convert(model, linear=True)"
    )
    add_dtype(parser)


def prepare(args):
    names = chosen(args.models)
    dtypes = dtypes_of(args)
    return dtypes, lambda: run_models(names, dtypes, args)


def chosen(names):
    """Raises ValueError."""
    found = names.split(",") if names else [*MODELS]
    if unknown := [name for name in found if name not in MODELS]:
        raise ValueError(f"--models: expected some of {', '.join(MODELS)}, got {unknown[0]}")
    return found


def run_models(names, dtypes, args):
    """The results. Raises WrongAnswer."""
    from tqdm import tqdm  # which only a run needs

    bar = tqdm(names, unit="model")
    return [result for name in bar for result in of_model(name, MODELS[name], dtypes, args)]


def of_model(name, about, dtypes, args):
    """Yields the results of its steps, in each dtype. Raises WrongAnswer."""
    models = {"qkv": about.make(), "torch": about.make()}
    qkv.convert(models["qkv"], linear=args.linear)
    inputs = about.inputs(models["torch"].config)
    truth = truths(models["torch"], inputs)
    has_relu = any(isinstance(x, nn.ReLU) for x in models["torch"].modules())
    drops = any(isinstance(x, nn.Dropout) and x.p for x in models["torch"].modules())
    for dtype in dtypes:
        for kind in inputs:
            made = {way: make_step(kind, x, inputs[kind], dtype) for way, x in models.items()}
            ours, theirs = (answers(models[way], kind, made[way]) for way in ("qkv", "torch"))
            turns = args.linear and dtype == torch.float32 and has_relu
            most = ROUNDINGS_OF_LINEAR if turns else ROUNDINGS
            checked = check(f"{name} {kind}", ours, theirs, truth[kind], dtype, most)
            del ours, theirs
            for is_dropping in [True, False] if drops and kind == "training" else [False]:
                step = f"{kind}, dropout" if is_dropping else kind
                about_it = {"name": f"{name} {step}", "model": name, "sizes": about.sizes}
                about_it |= {"step": step, "dtype": machine.name_of(dtype), "check": checked}
                yield about_it | timed(models, made, is_dropping, args)


def truths(model, inputs):
    """{kind: answers() in float64}"""
    double, found = copy.deepcopy(model).double(), {}
    for kind, given in inputs.items():
        step = make_step(kind, double, given, torch.float64)
        found[kind] = answers(double, kind, step)
    return found


def timed(models, made, is_dropping, args):
    """What a result has of the models' steps, {way: function}."""
    for model in models.values():
        model.train(is_dropping)
    samples = measure(made, args.seconds, args.repeats, PATIENCE_SECONDS)["samples_s"]
    parts = {way: shares(models[way], made[way]) for way in made}
    for model in models.values():
        model.eval().zero_grad()
    pairs = zip(samples["torch"], samples["qkv"], strict=True)
    time = {way: {"seconds": quartiles(x), "samples_s": x} for way, x in samples.items()}
    return {"parts": parts, "time": time | {"ratio": quartiles([x / y for x, y in pairs])}}


def tables(run):
    """One for each dtype. The last row of a model is its last step."""
    dtypes = dict.fromkeys(result["dtype"] for result in run["results"])
    return [(f"In {x}:", [row(r) for r in run["results"] if r["dtype"] == x]) for x in dtypes]


def row(result):
    """Behind the ratio stands whether it is little; the shares of torch's step, and the share that
    attention has of ours."""
    theirs = {part: f"{result['parts']['torch'][part]:.0%}" for part in PARTS}
    return {
        "model": result["model"],
        "B×L": result["sizes"],
        "step": result["step"],
        **table.times(result["time"]),
        "gain": f"< {LITTLE}" if result["time"]["ratio"]["median"] < LITTLE else "",
        **{f"torch's\n{part}": share for part, share in theirs.items()},
        f"our\n{ATTENTION}": f"{result['parts']['qkv'][ATTENTION]:.0%}",
    }


main = Program(
    "models", DESCRIPTION, add_arguments, prepare, tables, "step", needs=("transformers",)
).main

if __name__ == "__main__":
    sys.exit(main())
