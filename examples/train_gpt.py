#!/usr/bin/env python
"""Trains a byte-level GPT on the source text of Python's standard library.

train_gpt.py                            train on qkv's attention; Ctrl-C saves and stops
train_gpt.py --resume                   go on where it stopped, exactly
train_gpt.py --generate "def parse("    let the trained model write
train_gpt.py --compare                  both attentions from one seed, in two minutes (make demo)
"""

import argparse
import dataclasses
import math
import signal
import sys
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter

import torch
from tqdm import tqdm

from gpt.data import load_corpus
from gpt.generate import generate, timed
from gpt.model import CACHES, Int8Cache, ModelConfig, load_attention
from gpt.text import decode, encode
from gpt.train import TrainConfig, Trainer, load_model


def main(argv: list[str] | None = None) -> int:
    """Returns the exit status: 1 where --compare finds the attentions to disagree."""
    parser = make_parser()
    args = parser.parse_args(argv)
    try:
        check(args)
        if args.threads is not None:
            torch.set_num_threads(args.threads)
        if args.generate is not None:
            return write(args)
        if args.compare:
            return run_comparison(args)
        return train(args)
    except (ValueError, FileNotFoundError) as error:
        parser.error(str(error))


def check(args: argparse.Namespace) -> None:
    for name in ("threads", "save_every", "length", "seconds"):
        value = getattr(args, name)
        if value is not None and not 0 < value < math.inf:
            raise ValueError(f"--{name.replace('_', '-')}: expected more than 0, got {value}")
    if args.int8_cache and (args.generate is None or args.attention != "qkv"):
        raise ValueError("--int8-cache: expected with --generate, on qkv's attention")
    if args.compare and args.out.exists() and not args.out.is_dir():
        raise ValueError(f"--out: {args.out} is no folder")
    if args.compare and "dropout" in args:
        raise ValueError("--dropout: --compare trains without, and then times steps with it")
    if args.resume or args.generate is not None:
        settings = given(args, ModelConfig) | given(args, TrainConfig)
        if args.generate is not None:
            settings.pop("seed", None)
        if settings:
            names = ", ".join("--" + name.replace("_", "-") for name in settings)
            raise ValueError(f"{names}: {args.checkpoint} brings its own")
        if not args.checkpoint.exists():
            raise ValueError(f"--checkpoint: {args.checkpoint} does not exist; train first")


def make_parser() -> argparse.ArgumentParser:
    summary, _, usage = __doc__.partition("\n\n")
    parser = argparse.ArgumentParser(
        description=summary,
        epilog=f"examples:\n{usage}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--resume", action="store_true", help="continue the checkpoint's training")
    mode.add_argument("--generate", metavar="PROMPT", help="write text with the checkpoint's model")
    mode.add_argument("--compare", action="store_true", help="train on both attentions in turn")

    parser.add_argument(
        "--attention",
        choices=("qkv", "torch"),
        default="qkv",
        help="the model's; --compare takes both (default: qkv)",
    )
    add = adder(parser)
    add("--threads", int, None, "of the CPU (default: torch's choice)")
    add("--checkpoint", Path, Path("gpt.pt"), "where the model is kept")

    add = adder(parser.add_argument_group("model (a checkpoint brings its own)"))
    for field in dataclasses.fields(ModelConfig):
        add(flag(field), field.type, field.default, MEANING[field.name], stored=False)
    add = adder(parser.add_argument_group("training (a checkpoint brings its own)"))
    for field in dataclasses.fields(TrainConfig):
        add(flag(field), field.type, field.default, MEANING[field.name], stored=False)
    add("--save-every", int, 200, "steps from one checkpoint to the next")

    writing = parser.add_argument_group("writing")
    add = adder(writing)
    add("--length", int, 500, "in bytes; a run of blanks is one or two")
    add("--temperature", float, 0.7, "0: always the likeliest byte")
    writing.add_argument(
        "--int8-cache", action="store_true", help="keep keys and values in a quarter of the memory"
    )

    add = adder(parser.add_argument_group("comparison"))
    add("--seconds", float, 120.0, "for all of it")
    add("--out", Path, Path("demo"), "folder for the pictures and the model")
    return parser


MEANING = {
    "layers": "blocks of attention and MLP",
    "heads": "of attention",
    "head_dim": "features of a head; the model is heads times as wide",
    "context": "bytes of a training text, and the furthest that attention looks",
    "dropout": "the share of attention's weights that a training step drops",
    "steps": "of training; with --compare what the time allows",
    "batch": "texts in a step",
    "learning_rate": "at its highest",
    "weight_decay": "AdamW's",
    "seed": "decides the first weights, the texts' order and what is written",
}


def flag(field: dataclasses.Field) -> str:
    return "--" + field.name.replace("_", "-")


def adder(group):
    """add(flag, type, default, meaning) for an option that takes a value. With stored=False the
    result has it only if it was given."""

    def add(name: str, kind: type, default, meaning: str, stored: bool = True) -> None:
        if default is not None:
            meaning += f" (default: {default})"
        kept = default if stored else argparse.SUPPRESS
        group.add_argument(name, type=kind, default=kept, help=meaning, metavar=kind.__name__)

    return add


def given(args: argparse.Namespace, config: type) -> dict:
    """The fields of the dataclass `config` that the command line gives a value."""
    fields = (field.name for field in dataclasses.fields(config))
    return {name: getattr(args, name) for name in fields if name in args}


def train(args: argparse.Namespace) -> int:
    if not args.resume and args.checkpoint.exists():
        raise ValueError(f"{args.checkpoint} exists: --resume goes on, --checkpoint names another")
    corpus, attention = load_corpus(), load_attention(args.attention)
    if args.resume:
        trainer = Trainer.load(args.checkpoint, corpus, attention)
    else:
        model = ModelConfig(**given(args, ModelConfig))
        trainer = Trainer(model, TrainConfig(**given(args, TrainConfig)), corpus, attention)
    print(describe(trainer))
    with stop_requested() as stopped:
        train_until(trainer, stopped, args)
    print(
        f"step {trainer.step_number} of {trainer.config.steps}, validation loss "
        f"{trainer.validation_loss():.3f} nats per byte, saved to {args.checkpoint}"
        + (": --resume goes on from here" if stopped else "")
    )
    return 0


def train_until(trainer: Trainer, stopped: list, args: argparse.Namespace) -> None:
    """Trains to the last step or the first entry in `stopped`, and saves."""
    first, start = trainer.step_number, perf_counter()
    with tqdm(total=trainer.config.steps, initial=first, unit="step") as progress:
        while trainer.step_number < trainer.config.steps and not stopped:
            loss = trainer.step()
            done = trainer.step_number - first
            rate = done * trainer.bytes_per_step / (perf_counter() - start)
            progress.set_postfix_str(f"loss {loss:.3f}, {rate:.0f} tokens/s", refresh=False)
            progress.update()
            if trainer.step_number % args.save_every == 0:
                trainer.save(args.checkpoint)
                held_out = trainer.validation_loss()
                progress.write(f"step {trainer.step_number}: validation loss {held_out:.3f}")
    trainer.save(args.checkpoint)


@contextmanager
def stop_requested():
    """A list that the first Ctrl-C puts an entry into, so that a step is never left half done. The
    second one interrupts as ever."""
    received = []

    def receive(number, frame):
        received.append(number)
        signal.signal(signal.SIGINT, before)

    before = signal.signal(signal.SIGINT, receive)
    try:
        yield received
    finally:
        signal.signal(signal.SIGINT, before)


def describe(trainer: Trainer) -> str:
    parameters = sum(p.numel() for p in trainer.model.parameters())
    corpus, model = trainer.corpus, trainer.model.config
    return (
        f"{parameters / 1e6:.1f} million parameters: {model.layers} layers, {model.heads} heads of "
        f"{model.head_dim}, {model.context} bytes of context. Trains on "
        f"{len(corpus.train) / 1e6:.1f} MB of Python in {len(corpus.train_files)} files; "
        f"{len(corpus.validation_files)} more are held out."
    )


def write(args: argparse.Namespace) -> int:
    """Writes the text to stdout, and how fast it came to stderr."""
    model = load_model(args.checkpoint, load_attention(args.attention))
    seed = given(args, TrainConfig).get("seed", 0)
    prompt = encode(args.generate.encode())
    cache = Int8Cache if args.int8_cache else CACHES[args.attention]
    text, rate = timed(generate(model, prompt, args.length, args.temperature, seed, cache))
    print(args.generate + decode(text))
    kind = "an int8 cache" if args.int8_cache else "a cache"
    print(f"{rate:.0f} tokens/s on {args.attention}'s attention, with {kind}", file=sys.stderr)
    return 0


def run_comparison(args: argparse.Namespace) -> int:
    from gpt.report import report_comparison  # needs matplotlib, which training does not

    config = TrainConfig(**given(args, TrainConfig))
    seconds = None if "steps" in args else args.seconds
    return report_comparison(ModelConfig(**given(args, ModelConfig)), config, seconds, args.out)


if __name__ == "__main__":
    sys.exit(main())
