"""The same model from the same seed on both attentions, turn by turn in one process."""

import math
import statistics
from dataclasses import dataclass, field
from time import perf_counter

import torch
from tqdm import tqdm

from gpt.data import Corpus
from gpt.model import ModelConfig, load_attention
from gpt.timer import TimedAttention
from gpt.train import TrainConfig, Trainer

NAMES = ("qkv", "torch")
CHECKS = 10  # how many times in a comparison both attentions get the same weights


@dataclass
class Run:
    """What one of the two models did. Lists have an entry a step; times are in seconds."""

    trainer: Trainer
    attention: TimedAttention
    loss: list[float] = field(default_factory=list)
    step_seconds: list[float] = field(default_factory=list)
    forward_seconds: list[float] = field(default_factory=list)  # of attention
    backward_seconds: list[float] = field(default_factory=list)  # of attention

    def step(self) -> None:
        self.attention.reset()
        start = perf_counter()
        loss = self.trainer.step()
        self.step_seconds.append(perf_counter() - start)
        self.loss.append(loss)
        self.forward_seconds.append(self.attention.forward_seconds)
        self.backward_seconds.append(self.attention.backward_seconds)


@dataclass(frozen=True)
class SameWeights:
    """The difference that the attentions make after `step` steps where all else is equal: both
    models have the weights of the model on qkv, and the same batch."""

    step: int
    loss: float  # the absolute difference
    gradient: float  # the relative difference in Euclidean norm, of the parameter with the largest


@dataclass
class Comparison:
    runs: dict[str, Run]
    same_weights: list[SameWeights]

    def medians(self, name: str) -> dict[str, float]:
        """The medians of a step of run `name`, in seconds; "attention" is the median of the
        sums."""
        run = self.runs[name]
        attention = map(sum, zip(run.forward_seconds, run.backward_seconds, strict=True))
        return {
            "attention forward": statistics.median(run.forward_seconds),
            "attention backward": statistics.median(run.backward_seconds),
            "attention": statistics.median(attention),
            "step": statistics.median(run.step_seconds),
        }


def make_runs(model: ModelConfig, config: TrainConfig, corpus: Corpus) -> dict[str, Run]:
    runs = {}
    for name in NAMES:
        attention = TimedAttention(load_attention(name))
        runs[name] = Run(Trainer(model, config, corpus, attention), attention)
    return runs


def steps_within(seconds: float, model: ModelConfig, config: TrainConfig, corpus: Corpus) -> int:
    """The number of steps of both models that fit into `seconds`. Finds it by taking a few, which
    also warms the machine up."""
    runs = make_runs(model, config, corpus)
    pairs = []
    for _ in range(9):
        start = perf_counter()
        for run in runs.values():
            run.step()
        pairs.append(perf_counter() - start)
    typical = statistics.quantiles(pairs[1:], n=4)[0]  # so that a brief disturbance does not count
    return max(CHECKS, int(seconds / typical))


def compare(
    model: ModelConfig, config: TrainConfig, corpus: Corpus, deadline: float = math.inf
) -> Comparison:
    """Trains both to `config.steps`, or until perf_counter() passes `deadline`: one step each in
    turn, so that what slows the machine slows both. Who goes first changes each time."""
    comparison = Comparison(make_runs(model, config, corpus), [])
    runs = comparison.runs
    progress = tqdm(range(config.steps), unit="step", desc="Both models")
    for step in progress:
        if step % max(1, config.steps // CHECKS) == 0:
            comparison.same_weights.append(compare_on_same_weights(runs["qkv"]))
        for name in NAMES if step % 2 == 0 else reversed(NAMES):
            runs[name].step()
        if perf_counter() > deadline:
            break
        if step % 10 == 9:
            progress.set_postfix_str(
                "  ".join(
                    f"{name} loss {statistics.mean(run.loss[-10:]):.3f}, "
                    f"{statistics.median(run.step_seconds[-10:]) * 1e3:.0f} ms"
                    for name, run in runs.items()
                )
            )
    comparison.same_weights.append(compare_on_same_weights(runs["qkv"]))
    return comparison


def compare_on_same_weights(run: Run) -> SameWeights:
    trainer, own = run.trainer, run.attention.attention
    losses, gradients = {}, {}
    for name in NAMES:
        run.attention.attention = load_attention(name)
        losses[name], gradients[name] = trainer.validation_gradient()
    run.attention.attention = own
    relative = torch.stack([*map(relative_difference, gradients["qkv"], gradients["torch"])])
    loss = abs(losses["qkv"] - losses["torch"])
    return SameWeights(trainer.step_number, loss, relative.max().item())  # NaN if one of them is


def relative_difference(ours: torch.Tensor, theirs: torch.Tensor) -> torch.Tensor:
    difference, size = (torch.linalg.vector_norm(x) for x in (ours - theirs, theirs))
    return difference / size.clamp(min=1e-30)  # before the first step some gradients are all zero


# The bounds within which the attentions agree; losses are in nats a byte. On the same weights the
# attentions may differ by the rounding of float32. Two trainings start there, and then each step
# feeds on the last: a difference doubles every 20 to 50 steps, as between two machines that run the
# same program, until it is as large as another order of the texts would make it. A wrong gradient
# is out of these bounds within a step or two.
SAME_WEIGHTS_LOSS = 1e-5
SAME_WEIGHTS_GRADIENT = 1e-4
FIRST_STEP = 1e-5
STEPS_TO_DOUBLE = 20
ANY_STEP = 0.1
LAST_TENTH = 0.02  # the difference between the means over the last tenth of the steps


def loss_tolerance(step: int) -> float:
    return min(FIRST_STEP * 2.0 ** min(step / STEPS_TO_DOUBLE, 1000), ANY_STEP)


def disagreements(comparison: Comparison) -> list[str]:
    """The reasons why the two cannot be the same model; empty if there are none."""
    found = []
    for same in comparison.same_weights:
        if not (same.loss <= SAME_WEIGHTS_LOSS and same.gradient <= SAME_WEIGHTS_GRADIENT):
            found.append(
                f"after {same.step} steps, on the same weights: loss differs by {same.loss:.1e} "
                f"(at most {SAME_WEIGHTS_LOSS:.0e}), a gradient by {same.gradient:.1e} of its norm "
                f"(at most {SAME_WEIGHTS_GRADIENT:.0e})"
            )
    losses = [comparison.runs[name].loss for name in NAMES]
    for step, (ours, theirs) in enumerate(zip(*losses, strict=True)):
        if not abs(ours - theirs) <= loss_tolerance(step):
            found.append(
                f"step {step}: loss {ours:.6f} on qkv, {theirs:.6f} on torch "
                f"(may differ by {loss_tolerance(step):.1e})"
            )
    ours, theirs = (statistics.mean(last_tenth(loss)) for loss in losses)
    if not abs(ours - theirs) <= LAST_TENTH:
        found.append(f"last tenth: mean loss {ours:.4f} on qkv, {theirs:.4f} on torch")
    return found


def last_tenth(losses: list[float]) -> list[float]:
    return losses[-max(1, len(losses) // 10) :]
