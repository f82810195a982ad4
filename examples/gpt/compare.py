"""The same model from the same seed on both attentions, turn by turn in one process."""

import statistics
from dataclasses import dataclass, field
from time import perf_counter

from gpt.data import Corpus
from gpt.model import ModelConfig, load_attention
from gpt.timer import TimedAttention
from gpt.train import TrainConfig, Trainer
from tqdm import tqdm

NAMES = ("qkv", "torch")

# Losses, in nats a byte, that count as the same. The attentions sum in different orders, so their
# results differ in the last bits of float32, and every step of training multiplies what differs:
# the two runs start within rounding and drift apart, as two runs of one attention would on two
# machines. A wrong gradient shows at once, long before the drift.
FIRST_TOLERANCE = 1e-5  # before any training: rounding alone
TOLERANCE_GROWTH = 1.0  # to be set from the measured drift
LAST_TOLERANCE = 0.1


def loss_tolerance(step: int) -> float:
    return min(FIRST_TOLERANCE * (1 + step) ** TOLERANCE_GROWTH, LAST_TOLERANCE)


@dataclass
class Run:
    """What one of the two models did. Lists have an entry a step; times are in seconds."""

    trainer: Trainer
    attention: TimedAttention
    loss: list[float] = field(default_factory=list)
    step_seconds: list[float] = field(default_factory=list)
    forward_seconds: list[float] = field(default_factory=list)
    backward_seconds: list[float] = field(default_factory=list)

    def step(self) -> None:
        self.attention.reset()
        start = perf_counter()
        loss = self.trainer.step()
        self.step_seconds.append(perf_counter() - start)
        self.loss.append(loss)
        self.forward_seconds.append(self.attention.forward_seconds)
        self.backward_seconds.append(self.attention.backward_seconds)

    def medians(self) -> dict[str, float]:
        """Of a step, in seconds: "step", "forward" and "backward" (attention's), "attention"."""
        both = map(sum, zip(self.forward_seconds, self.backward_seconds, strict=True))
        times = {
            "step": self.step_seconds,
            "forward": self.forward_seconds,
            "backward": self.backward_seconds,
            "attention": both,
        }
        return {name: statistics.median(seconds) for name, seconds in times.items()}


def make_runs(model: ModelConfig, config: TrainConfig, corpus: Corpus) -> dict[str, Run]:
    runs = {}
    for name in NAMES:
        attention = TimedAttention(load_attention(name))
        runs[name] = Run(Trainer(model, config, corpus, attention), attention)
    return runs


def steps_within(seconds: float, model: ModelConfig, config: TrainConfig, corpus: Corpus) -> int:
    """How many steps of both models fit; from a few steps, which warm the machine up besides."""
    runs = make_runs(model, config, corpus)
    pairs = []
    for _ in range(6):
        start = perf_counter()
        for run in runs.values():
            run.step()
        pairs.append(perf_counter() - start)
    return max(20, int(seconds / statistics.median(pairs[1:])))


def train_both(model: ModelConfig, config: TrainConfig, corpus: Corpus) -> dict[str, Run]:
    """Trains to `config.steps`, one step each in turn: what slows the machine slows both. Who goes
    first changes from step to step."""
    runs = make_runs(model, config, corpus)
    progress = tqdm(range(config.steps), unit="step", desc="both models")
    for step in progress:
        for name in NAMES if step % 2 == 0 else reversed(NAMES):
            runs[name].step()
        losses = {name: f"{run.loss[-1]:.4f}" for name, run in runs.items()}
        seconds = {name: f"{run.step_seconds[-1] * 1e3:.0f}ms" for name, run in runs.items()}
        progress.set_postfix({name: f"{losses[name]} {seconds[name]}" for name in NAMES})
    return runs
