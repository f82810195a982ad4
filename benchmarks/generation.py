"""python -m benchmarks.generation: how fast a GPT writes with its keys and values in a cache."""

import sys
from pathlib import Path

import torch

from qkv.bench.command import positive
from qkv.bench.measure import measure, quartiles

from . import table
from .check import WrongAnswer
from .program import Program

sys.path.append(str(Path(__file__).resolve().parents[1] / "examples"))
from gpt.generate import generate  # noqa: E402
from gpt.model import CACHES, GPT, VOCAB_SIZE, ModelConfig, load_attention  # noqa: E402

DESCRIPTION = """\
The model is that of examples/train_gpt.py, with random weights, in float32. The cache is memory
that is taken once. Ours is qkv.attention_with_kvcache; torch's is written to, and
scaled_dot_product_attention gets the part that is filled. Both write the same tokens, or nothing
is timed. The time is that of the whole text: the prompt is read, then each token is written."""
PROMPTS = (16, 1024)  # tokens that are read before the first one is written


def add_arguments(parser):
    number = positive(int)
    parser.add_argument("--layers", type=number, default=4)
    parser.add_argument("--heads", type=number, default=8)
    parser.add_argument("--head-dim", type=number, default=64)
    parser.add_argument("--prompts", type=number, nargs="+", default=PROMPTS, help="their lengths")
    parser.add_argument("--length", type=number, default=128, help="tokens to write; default: 128")


def prepare(args):
    model = make_model(args)
    return [torch.float32], lambda: [timed(model, prompt, args) for prompt in args.prompts]


def make_model(args):
    """A GPT of which every layer has a say: those of the example begin with weights of 0."""
    context = max(args.prompts) + args.length
    torch.manual_seed(0)
    config = ModelConfig(args.layers, args.heads, args.head_dim, context)
    model = GPT(config, load_attention("torch")).eval()
    for weight in model.parameters():
        if not weight.any():
            torch.nn.init.normal_(weight, std=weight.size(-1) ** -0.5)
    return model


def timed(model, prompt_length, args):
    prompt = bytes(torch.randint(VOCAB_SIZE, (prompt_length,)).tolist())

    def write(name):
        return list(generate(model, prompt, args.length, 0, 0, CACHES[name]))

    expect_same(write("qkv"), write("torch"), prompt_length)
    taken = measure({n: lambda n=n: write(n) for n in CACHES}, args.seconds, args.repeats)
    samples = taken["samples_s"]
    rates = {n: quartiles([args.length / seconds for seconds in x]) for n, x in samples.items()}
    pairs = zip(samples["torch"], samples["qkv"], strict=True)
    return {
        "name": f"prompt of {prompt_length}",
        "dtype": "float32",
        "model": f"{args.layers} layers, {args.heads} heads of {args.head_dim}",
        "prompt": prompt_length,
        "length": args.length,
        "tokens_per_s": rates,
        "samples_s": samples,
        "generation": {"ratio": quartiles([theirs / ours for theirs, ours in pairs])},
    }


def expect_same(ours, theirs, prompt_length):
    for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        if a != b:
            raise WrongAnswer(f"after {prompt_length + i} tokens qkv writes {a}, torch {b}")


def tables(run):
    def row(result):
        ours, theirs = (result["tokens_per_s"][name]["median"] for name in ("qkv", "torch"))
        return {
            "model": result["model"],
            "prompt": str(result["prompt"]),
            "written": str(result["length"]),
            "tokens/s": f"{ours:.0f}",
            "torch's": f"{theirs:.0f}",
            table.RATIO: table.ratio(result["generation"], with_spread=True),
        }

    return [("", [row(result) for result in run["results"]])]


main = Program(
    "generation", DESCRIPTION, add_arguments, prepare, tables, "prompt", "generation"
).main

if __name__ == "__main__":
    sys.exit(main())
