"""python -m benchmarks.latent: latent attention in transformers, "qkv" beside "sdpa"."""

import copy
import sys

import torch
from tabulate import tabulate

import qkv.integrations.transformers
from qkv.bench.command import add_timing, new_parser, positive
from qkv.bench.measure import measure, quartiles

from .check import WrongAnswer

DESCRIPTION = """\
A layer of attention of DeepSeek V2-Lite's size, DeepseekV3Attention with all of its projections:
one token with so many keys in the cache, a prompt, and a step of training on it. "expanded" is
"qkv" where keys and values of all heads are made at every step, as where kv_b_proj is no plain
Linear; "and linear" is LatentCache after qkv.convert(model, linear=True). All give the same, or
nothing is timed. Times are medians; run it with OMP_PROC_BIND=true."""
WAYS = ("sdpa", "expanded", "qkv", "LatentCache", "and linear")
ERRORS = {torch.float32: 1e-4, torch.bfloat16: 5e-2}  # of the largest number


def main(argv=None):
    """Returns the exit status: 0, or 1 where results differ. Bad arguments exit with 2."""
    args = make_parser().parse_args(argv)
    if args.threads:
        torch.set_num_threads(args.threads)
    qkv.integrations.transformers.register()
    rows = []
    for dtype in (torch.float32, torch.bfloat16):
        layers = make_layers(dtype, args)
        cases = {f"1 token, {n} keys": decoding(layers, n, dtype) for n in args.keys}
        cases[f"prompt of {args.prompt}"] = prompt(layers, args.prompt, dtype, False)
        cases[f"training, {args.prompt}"] = prompt(layers, args.prompt, dtype, True)
        for name, calls in cases.items():
            try:
                expect_same(name, calls, dtype)
            except WrongAnswer as error:
                print(f"refused to time another layer: {error}", file=sys.stderr)
                return 1
            taken = measure(calls, args.seconds, args.repeats)["samples_s"]
            rows.append([str(dtype)[6:], name, *cells(taken)])
    titles = ["dtype", "call", *(f"{way}, ms" for way in WAYS)]
    titles += [f"sdpa / {way}" for way in WAYS[1:]]
    print(tabulate(rows, titles, "github", disable_numparse=True))
    return 0


def make_parser():
    parser = new_parser("benchmarks.latent", DESCRIPTION)
    number = positive(int)
    parser.add_argument("--heads", type=number, default=16)
    parser.add_argument("--hidden-size", type=number, default=2048)
    parser.add_argument(
        "--keys", type=number, nargs="*", default=(1024, 4096, 16384), help="none: prompts alone"
    )
    parser.add_argument("--prompt", type=number, default=4096, help="its length; default: 4096")
    add_timing(parser, "call")
    return parser


def make_layers(dtype, args):
    """{way: layer}, with the same weights."""
    from transformers import DeepseekV3Config, DeepseekV3Model

    torch.manual_seed(0)
    config = DeepseekV3Config(
        vocab_size=1, hidden_size=args.hidden_size, num_attention_heads=args.heads,
        num_key_value_heads=args.heads, q_lora_rank=None, num_hidden_layers=1,
        first_k_dense_replace=1, intermediate_size=1, pad_token_id=0, eos_token_id=None,
    )  # fmt: skip
    layers = {}
    for way in WAYS:
        model = DeepseekV3Model(copy.deepcopy(config)).to(dtype)
        model.set_attn_implementation("sdpa" if way == "sdpa" else "qkv")
        layers[way] = model.layers[0].self_attn
        layers[way].load_state_dict(layers["sdpa"].state_dict())
        if way == "and linear":
            qkv.convert(model, linear=True)
    layers["expanded"].kv_b_proj.register_forward_hook(lambda *_: None)
    return layers


def decoding(layers, keys, dtype):
    """{way: one token}, after which the cache is what it was."""
    from transformers import DynamicCache

    latents, rotary = torch.randn(1, 1, keys - 1, 512), torch.randn(1, 1, keys - 1, 64)
    x, embeddings = token_and_angles(layers, 1, dtype)

    def step(layer, cache):
        with torch.no_grad():
            output = layer(x, embeddings, None, past_key_values=cache)[0]
        cache.crop(-1)
        return output

    calls = {}
    for way, layer in layers.items():
        latent_cache = qkv.integrations.transformers.LatentCache
        kind = latent_cache if way in WAYS[-2:] else DynamicCache
        cache = kind(config=layer.config)
        with torch.no_grad():
            cache.update(latents.to(dtype), rotary.to(dtype), 0)
        calls[way] = lambda layer=layer, cache=cache: step(layer, cache)
    return calls


def prompt(layers, length, dtype, training):
    """{way: the layer on a prompt, or that and its gradients}; there is no cache."""
    x, embeddings = token_and_angles(layers, length, dtype)
    grad_output = torch.randn_like(x)

    def run(layer):
        with torch.set_grad_enabled(training):
            output = layer(x, embeddings, None)[0]
        if not training:
            return output
        return torch.cat([x.flatten() for x in torch.autograd.grad(
            output, [*layer.parameters()], grad_output
        )])  # fmt: skip

    return {way: lambda layer=layers[way]: run(layer) for way in WAYS[:-2]}


def token_and_angles(layers, length, dtype):
    x = torch.randn(1, length, layers["sdpa"].hidden_size, dtype=dtype)
    angles = torch.rand(1, length, 64)
    return x, (angles.cos().to(dtype), angles.sin().to(dtype))


def expect_same(name, calls, dtype):
    expected = calls["sdpa"]().float()
    for way, call in calls.items():
        error = ((call().float() - expected).abs().max() / expected.abs().max()).item()
        if not error <= ERRORS[dtype]:
            raise WrongAnswer(f"{name}, {dtype}: {way} differs from sdpa by {error:.1e}")


def cells(taken):
    """Medians, and those of the ratios turn by turn; nothing for a way that there is not."""
    medians = [quartiles(taken[way])["median"] for way in taken]
    ratios = [
        quartiles([a / b for a, b in zip(taken["sdpa"], taken[way], strict=True)])["median"]
        for way in taken
    ][1:]
    empty = [""] * (len(WAYS) - len(taken))
    times = [f"{1e3 * seconds:.2f}" for seconds in medians]
    return [*times, *empty, *(f"{ratio:.1f}" for ratio in ratios), *empty]


if __name__ == "__main__":
    sys.exit(main())
