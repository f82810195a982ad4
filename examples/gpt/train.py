"""Training, step by step, from a state that a checkpoint holds in full."""

import math
import os
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from gpt.data import Corpus, sample_batch
from gpt.model import GPT, ModelConfig

CHECKPOINT_FORMAT = 3  # format 1 had no number and another encoding of text, 2 other names
VALIDATION_SEED = -1  # the seed of no step
MAX_GRADIENT_NORM = 1.0


@dataclass(frozen=True)
class TrainConfig:
    steps: int = 2000
    batch: int = 2
    learning_rate: float = 1e-3
    weight_decay: float = 0.1
    seed: int = 0

    def __post_init__(self):
        for name in ("steps", "batch"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected 1 or more, got {getattr(self, name)}")
        for name in ("learning_rate", "weight_decay"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name}: expected 0 or more, got {getattr(self, name)}")


class Trainer:
    """A model in training. Everything random is a function of the seed and the step's number, so
    model, optimizer and step are the whole state."""

    def __init__(self, model: ModelConfig, config: TrainConfig, corpus: Corpus, attention):
        torch.manual_seed(config.seed)
        self.config = config
        self.corpus = corpus
        self.model = GPT(model, attention).eval()  # in train mode within a step only
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(),
            betas=(0.8, 0.95),
            weight_decay=config.weight_decay,
            fused=True,
        )
        self.step_number = 0

    @property
    def bytes_per_step(self) -> int:
        return self.config.batch * self.model.config.context

    def learning_rate(self) -> float:
        """The learning rate: up in a straight line over the first tenth of the steps, then down to
        zero."""
        warmup = max(1, self.config.steps // 10)
        left = max(0, self.config.steps - self.step_number)
        share = min((self.step_number + 1) / warmup, left / max(1, self.config.steps - warmup))
        return self.config.learning_rate * share

    def step(self) -> float:
        """Takes one step of the optimizer. Returns the loss before it, in nats a byte."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate()
        seed = self.config.seed * 1_000_003 + self.step_number
        torch.manual_seed(seed)  # dropout draws from torch's generator
        self.model.train()
        loss = self._loss(self.corpus.train, seed)
        self.model.eval()
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), MAX_GRADIENT_NORM)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step_number += 1
        return loss.item()

    @torch.no_grad()
    def validation_loss(self, batches: int = 8) -> float:
        """The loss in nats a byte on text that is never trained on; the text is the same each
        time."""
        losses = [self._loss(self.corpus.validation, VALIDATION_SEED - i) for i in range(batches)]
        return sum(loss.item() for loss in losses) / batches

    def validation_gradient(self) -> tuple[float, tuple[torch.Tensor, ...]]:
        """The loss on one batch of that text, and its gradient by each parameter."""
        loss = self._loss(self.corpus.validation, VALIDATION_SEED)
        return loss.item(), torch.autograd.grad(loss, list(self.model.parameters()))

    def _loss(self, text: torch.Tensor, seed: int) -> torch.Tensor:
        batch = self.config.batch
        inputs, targets = sample_batch(text, batch, self.model.config.context, seed)
        return F.cross_entropy(self.model(inputs).flatten(0, 1), targets.flatten())

    def save(self, path: Path) -> None:
        """Writes a checkpoint; an interruption leaves the old one whole."""
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(path.suffix + ".partial")
        state = {
            "format": CHECKPOINT_FORMAT,
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
        """The trainer that `save` wrote, which goes on exactly as if it had never stopped."""
        state = read_checkpoint(path)
        model, config = ModelConfig(**state["model_config"]), TrainConfig(**state["train_config"])
        trainer = cls(model, config, corpus, attention)
        trainer.model.load_state_dict(state["model"])
        trainer.optimizer.load_state_dict(state["optimizer"])
        trainer.step_number = state["step"]
        return trainer


def read_checkpoint(path: Path) -> dict:
    state = torch.load(path, weights_only=True)
    found = state.get("format", 1)
    if found != CHECKPOINT_FORMAT:
        raise ValueError(
            f"{path}: expected a checkpoint of format {CHECKPOINT_FORMAT}, got format {found}, "
            "of another model; train it again"
        )
    return state


def load_model(path: Path, attention) -> GPT:
    """The model of a checkpoint, without its training and in eval mode."""
    state = read_checkpoint(path)
    model = GPT(ModelConfig(**state["model_config"]), attention).eval()
    model.load_state_dict(state["model"])
    return model
