"""A comparison from beginning to end, told to the person at the terminal."""

import dataclasses
import math
import os
import shlex
import sys
from pathlib import Path
from statistics import mean
from time import perf_counter

import torch

import qkv
from gpt.attention_map import attention_maps, telling_line
from gpt.compare import (
    NAMES,
    Comparison,
    compare,
    disagreements,
    last_tenth,
    loss_tolerance,
    steps_within,
)
from gpt.data import Corpus, load_corpus
from gpt.generate import generate
from gpt.model import GPT, ModelConfig
from gpt.plots import plot_attention, plot_losses, plot_times
from gpt.text import decode
from gpt.train import TrainConfig
from gpt.variants import Variant, time_variants
from qkv.env import cpu_model

AROUND_TRAINING = 12.0  # the seconds that calibration, checks, sample and pictures take
VARIANTS = 16.0  # the seconds for the variants, or an eighth of all where that is less
PATIENCE = 1.2  # others may need the machine: training ends after so many times its seconds
SAMPLE_BYTES = 500


def report_comparison(
    model: ModelConfig, config: TrainConfig, seconds: float | None, folder: Path
) -> int:
    """Compares, prints, and writes PNGs and the model on qkv into `folder`. With `seconds`,
    config.steps is replaced by what fits into so many. Returns 0, or 1 where the attentions
    disagree."""
    start, load = perf_counter(), os.getloadavg()[0]
    corpus = load_corpus()
    for_variants = VARIANTS if seconds is None else min(VARIANTS, seconds / 8)
    if seconds is not None:
        training = max(1.0, seconds - AROUND_TRAINING - for_variants)
        fitting = steps_within(training, model, config, corpus)
        config = dataclasses.replace(config, steps=fitting)
    print(
        f"A GPT of {model.layers} layers, {model.heads} heads of {model.head_dim} and "
        f"{model.context} bytes of context\nlearns {len(corpus.train) / 1e6:.1f} MB of Python in "
        f"{config.steps} steps, once with each attention, from seed {config.seed},\n"
        f"on {machine()}."
    )
    if load > 1:
        print(f"Others use this machine (load average {load:.1f}), and disturb the times.")
    end = math.inf if seconds is None else start + PATIENCE * seconds - for_variants
    comparison = compare(model, config, corpus, deadline=end)
    done = comparison.runs["qkv"].trainer.step_number
    if done < config.steps:
        print(f"Only {done} steps: the machine is slower than when it was asked.")
    variants = time_variants(model, config, corpus, for_variants)
    found = disagreements(comparison)
    print(agreement(comparison) + times(comparison, variants))
    trained = comparison.runs["qkv"].trainer
    print(sample(trained.model, corpus))
    pictures = draw(comparison, variants, trained.model, corpus, folder)
    print(f"Pictures: {', '.join(map(str, pictures))}")
    checkpoint = folder / "gpt.pt"
    trained.save(checkpoint)
    print(f"The model on qkv: {checkpoint}. To let it write:\n  {writing(checkpoint)}")
    print(f"{perf_counter() - start:.0f} s in all.\n\n{headline(comparison, variants)}")
    for line in found:
        print(f"DISAGREEMENT {line}")
    return 1 if found else 0


def machine() -> str:
    """The name of the processor, and how many threads and which instructions are used."""
    threads = torch.get_num_threads()
    return f"{threads} thread{'s'[: threads > 1]} of {cpu_model()}, qkv with {qkv.active_isa()}"


def agreement(comparison: Comparison) -> str:
    """The figures that `disagreements` judges."""
    ours, theirs = (comparison.runs[name].loss for name in NAMES)
    held_out = [comparison.runs[name].trainer.validation_loss() for name in NAMES]
    gaps = [abs(a - b) for a, b in zip(ours, theirs, strict=True)]
    closest = max(range(len(gaps)), key=lambda step: gaps[step] / loss_tolerance(step))
    same = comparison.same_weights
    loss, gradient = max(check.loss for check in same), max(check.gradient for check in same)
    return f"""
Loss, nats per byte              qkv      torch
  first step              {ours[0]:10.4f} {theirs[0]:10.4f}
  mean of the last tenth  {mean(last_tenth(ours)):10.4f} {mean(last_tenth(theirs)):10.4f}
  held-out files          {held_out[0]:10.4f} {held_out[1]:10.4f}
Largest difference
  on the same weights     {loss:10.1e} in the loss, {gradient:.1e} of a gradient's norm;
                                     checked {len(same)} times along the way
  of two steps            {max(gaps):10.1e}: rounding, which grows from step to step
  beside what is allowed  {gaps[closest]:10.1e} in step {closest}; allowed there: \
{loss_tolerance(closest):.1e}
"""


def times(comparison: Comparison, variants: list[Variant]) -> str:
    parts = {name: comparison.medians(name) for name in NAMES}
    for variant in variants:
        for name, step in variant.medians().items():
            parts[name][f"step, {variant.name}"] = step
    rows = ["\nMilliseconds, median           qkv      torch   torch / qkv"]
    for part in parts["qkv"]:
        ours, theirs = (parts[name][part] * 1e3 for name in NAMES)
        rows.append(f"  {part:20} {ours:12.2f} {theirs:10.2f} {theirs / ours:13.2f}")
    return "\n".join(rows) + (
        "\n  (attention: the wall-clock time of its calls, and of its node in the backward pass,"
        "\n  in all layers of a step)\n"
    )


def sample(model: GPT, corpus: Corpus) -> str:
    """The code that the model writes after held-out code: it goes on where a method assigns its
    argument."""
    _, code = telling_line(corpus)
    prompt = code[-model.config.context // 2 :] + b"\n"
    text = bytes(generate(model, prompt, SAMPLE_BYTES, temperature=0.7, seed=0))
    shown = b"\n".join(prompt.splitlines()[-4:])
    rule = "-" * 80
    return (
        f"Held-out code, and from the mark on what the model on qkv writes:\n{rule}\n"
        f"{decode(shown)}\n▶{decode(text)}\n{rule}"
    )


def writing(checkpoint: Path) -> str:
    """The command that lets the checkpoint's model write."""
    python = min(sys.executable, os.path.relpath(sys.executable), key=len)
    return shlex.join(
        [python, sys.argv[0], "--generate", "class Queue:", "--checkpoint", str(checkpoint)]
    )


def headline(comparison: Comparison, variants: list[Variant]) -> str:
    """What a step took as it was trained, and in each of the variants."""
    medians = [{name: comparison.medians(name)["step"] for name in NAMES}]
    medians += [variant.medians() for variant in variants]
    beginnings = ["A training step took"]
    beginnings += [f"With {variant.name} it took" for variant in variants]
    return "\n".join(
        f"{beginning} {seconds['qkv'] * 1e3:.0f} ms on qkv and {seconds['torch'] * 1e3:.0f} ms on "
        f"torch: {seconds['torch'] / seconds['qkv']:.2f} times as fast."
        for beginning, seconds in zip(beginnings, medians, strict=True)
    )


def draw(
    comparison: Comparison, variants: list[Variant], model: GPT, corpus: Corpus, folder: Path
) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    where = machine()
    losses, steps, attention = (
        folder / f"{name}.png" for name in ("losses", "step_times", "attention_map")
    )
    plot_losses(comparison, f"One GPT, two attentions, one seed ({where})", losses)
    plot_times(comparison, variants, f"Where the time of a training step goes ({where})", steps)
    line = b"\n" + telling_line(corpus)[0]
    title = "What the trained model looks at in a line it has never seen"
    plot_attention(attention_maps(model, line), line, title, attention)
    return [losses, steps, attention]
