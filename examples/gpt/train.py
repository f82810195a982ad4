"""Training, step by step, from a state that a checkpoint holds in full."""

import math
import os
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from gpt.data import Corpus, sample_batch
from gpt.model import GPT, ModelConfig

VALIDATION_SEED = -1  # no step has it


@dataclass(frozen=True)
class TrainConfig:
    steps: int = 2000
    batch: int = 1
    learning_rate: float = 2e-3
    weight_decay: float = 0.1
    seed: int = 0


class Trainer:
    """A model in training. Everything random is a function of the seed and the step's number, so
    model, optimizer and step are the whole state."""

    def __init__(self, model: ModelConfig, config: TrainConfig, corpus: Corpus, attention):
        torch.manual_seed(config.seed)
        self.config = config
        self.corpus = corpus
        self.model = GPT(model, attention)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(),
            betas=(0.9, 0.95),
            weight_decay=config.weight_decay,
            fused=True,
        )
        self.step_number = 0

    def learning_rate(self) -> float:
        """Up in a straight line over the first tenth, then down along a cosine to a tenth."""
        warmup = max(1, self.config.steps // 10)
        if self.step_number < warmup:
            return self.config.learning_rate * (self.step_number + 1) / warmup
        progress = (self.step_number - warmup) / max(1, self.config.steps - warmup)
        return self.config.learning_rate * (0.55 + 0.45 * math.cos(math.pi * min(progress, 1.0)))

    def step(self) -> float:
        """One step of the optimizer. Returns the loss before it, in nats a byte."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate()
        loss = self._loss(self.corpus.train, self.config.seed * 1_000_003 + self.step_number)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step_number += 1
        return loss.item()

    @torch.no_grad()
    def validation_loss(self, batches: int = 8) -> float:
        """Nats a byte on text that is never trained on; the same text each time."""
        losses = [self._loss(self.corpus.validation, VALIDATION_SEED - i) for i in range(batches)]
        return sum(loss.item() for loss in losses) / batches

    def _loss(self, text: torch.Tensor, seed: int) -> torch.Tensor:
        batch = self.config.batch
        inputs, targets = sample_batch(text, batch, self.model.config.context, seed)
        return F.cross_entropy(self.model(inputs).flatten(0, 1), targets.flatten())

    def save(self, path: Path) -> None:
        """Writes a checkpoint; an interruption leaves the old one whole."""
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(path.suffix + ".partial")
        state = {
            "model_config": asdict(self.model.config),
            "train_config": asdict(self.config),
            "step": self.step_number,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
        }
        torch.save(state, partial)
        os.replace(partial, path)

    @classmethod
    def load(cls, path: Path, corpus: Corpus, attention) -> "Trainer":
        """The trainer that `save` wrote. Goes on exactly as if it had never stopped."""
        state = torch.load(path, weights_only=True)
        model, config = ModelConfig(**state["model_config"]), TrainConfig(**state["train_config"])
        trainer = cls(model, config, corpus, attention)
        trainer.model.load_state_dict(state["model"])
        trainer.optimizer.load_state_dict(state["optimizer"])
        trainer.step_number = state["step"]
        return trainer


def load_model(path: Path, attention) -> GPT:
    """The model of a checkpoint, without its training."""
    state = torch.load(path, weights_only=True)
    model = GPT(ModelConfig(**state["model_config"]), attention)
    model.load_state_dict(state["model"])
    return model
