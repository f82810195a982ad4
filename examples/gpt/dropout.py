"""What a training step costs with dropout of attention's weights, on both attentions in turn."""

import dataclasses
import statistics
from time import perf_counter

from gpt.compare import NAMES
from gpt.data import Corpus
from gpt.model import ModelConfig, load_attention
from gpt.train import TrainConfig, Trainer

DROPOUT = 0.1  # BERT's and GPT-2's
FEWEST, MOST = 3, 15  # steps of each model that are timed


def steps_with_dropout(
    model: ModelConfig, config: TrainConfig, corpus: Corpus, seconds: float
) -> dict[str, list[float]]:
    """The seconds of each step on either attention: one step each in turn, for about `seconds`.

    Only the times are compared. The two draw different random numbers, so they drop different
    weights, and their losses differ by more than rounding.
    """
    model = dataclasses.replace(model, dropout=DROPOUT)
    trainers = {name: Trainer(model, config, corpus, load_attention(name)) for name in NAMES}
    for trainer in trainers.values():
        trainer.step()  # warms up: the first step takes its memory from the system
    times: dict[str, list[float]] = {name: [] for name in NAMES}
    end = perf_counter() + seconds
    for turn in range(MOST):
        for name in NAMES if turn % 2 == 0 else reversed(NAMES):
            start = perf_counter()
            trainers[name].step()
            times[name].append(perf_counter() - start)
        if turn + 1 >= FEWEST and perf_counter() > end:
            break
    return times


def medians(times: dict[str, list[float]]) -> dict[str, float]:
    return {name: statistics.median(seconds) for name, seconds in times.items()}
