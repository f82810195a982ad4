"""What a training step costs in settings where attention is more of it, on both attentions."""

import dataclasses
import statistics
from dataclasses import dataclass
from time import perf_counter

from gpt.compare import NAMES
from gpt.data import Corpus
from gpt.model import ModelConfig, load_attention
from gpt.train import TrainConfig, Trainer

FEWEST, MOST = 3, 15  # steps of each model that are timed
DROPOUT = 0.1  # BERT's and GPT-2's
LONG = 2048


@dataclass(frozen=True)
class Variant:
    """A setting in which steps are timed. `step_seconds` has an entry a step for each attention."""

    name: str
    step_seconds: dict[str, list[float]]

    def medians(self) -> dict[str, float]:
        """The median seconds of a step, for each attention."""
        return {name: statistics.median(times) for name, times in self.step_seconds.items()}


def time_variants(
    model: ModelConfig, config: TrainConfig, corpus: Corpus, seconds: float
) -> list[Variant]:
    """The same model with dropout of attention's weights, and with a long context, for about
    `seconds` in all."""
    long = dataclasses.replace(config, batch=max(1, config.batch * model.context // LONG))
    settings = {
        f"dropout {DROPOUT}": (dataclasses.replace(model, dropout=DROPOUT), config),
        f"context {LONG}": (dataclasses.replace(model, context=LONG), long),
    }
    return [
        Variant(name, time_steps(*setting, corpus, seconds / len(settings)))
        for name, setting in settings.items()
    ]


def time_steps(
    model: ModelConfig, config: TrainConfig, corpus: Corpus, seconds: float
) -> dict[str, list[float]]:
    """The seconds of each step on either attention: one step each in turn, for about `seconds`.

    Only the times are compared. With dropout the two draw different random numbers, so they drop
    different weights, and their losses differ by more than rounding.
    """
    end = perf_counter() + seconds
    trainers = {name: Trainer(model, config, corpus, load_attention(name)) for name in NAMES}
    for trainer in trainers.values():
        trainer.step()  # warms up: the first step takes its memory from the system
    times: dict[str, list[float]] = {name: [] for name in NAMES}
    for turn in range(MOST):
        for name in NAMES if turn % 2 == 0 else reversed(NAMES):
            start = perf_counter()
            trainers[name].step()
            times[name].append(perf_counter() - start)
        if turn + 1 >= FEWEST and perf_counter() > end:
            break
    return times
