"""Smoothing a noisy series: by a bell curve, and by attention that has learned where to look.

Both are averages of the same noisy values; only the weights differ. The bell curve's depend on the
distance alone. The learned ones depend on the values as well: each place asks with the values
around it, and each place answers with those around it, so that what lies beyond a jump can be left
out of an average.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import qkv
from qkv.nn import GaussianSmoothing
from tour.chapter import Chapter
from tour.style import BLUE, GREY, ORANGE, RED, picture

LENGTH = 120
NOISE = 0.25
JUMPS = 0.04  # the share of places at which the series takes a new level


def draw_series(batch: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """(what is true, what is measured): [batch, LENGTH, 1] each; levels that jump, and noise."""
    jumps = torch.rand(batch, LENGTH, generator=generator) < JUMPS
    jumps[:, 0] = True
    levels = torch.rand(batch, LENGTH, generator=generator) * 3 - 1.5
    latest = torch.where(jumps, torch.arange(LENGTH), 0).cummax(-1).values
    true = levels.gather(-1, latest).unsqueeze(-1)
    return true, true + NOISE * torch.randn(true.shape, generator=generator)


class LearnedSmoothing(nn.Module):
    """Attention within a series [B, L, 1]: the values are averaged, and nothing else is done to
    them. Query and key come from the 2 * reach + 1 values around a place; a learned slope takes
    something off for the distance."""

    def __init__(self, reach: int = 7, hidden: int = 64, head_dim: int = 16):
        super().__init__()
        self.reach = reach
        self.see = nn.Sequential(nn.Linear(2 * reach + 1, hidden), nn.GELU())
        self.to_query, self.to_key = nn.Linear(hidden, head_dim), nn.Linear(hidden, head_dim)
        self.slope = nn.Parameter(torch.tensor([0.1]))

    def query_and_key(self, measured: Tensor) -> tuple[Tensor, Tensor]:
        """[B, 1, L, head_dim] each."""
        ends = F.pad(measured.transpose(1, 2), (self.reach, self.reach), mode="replicate")
        seen = self.see(ends.squeeze(1).unfold(-1, 2 * self.reach + 1, 1))
        return self.to_query(seen).unsqueeze(1), self.to_key(seen).unsqueeze(1)

    def forward(self, measured: Tensor) -> tuple[Tensor, Tensor]:
        """The smoothed series [B, L, 1], and the weights [B, L, L]."""
        query, key = self.query_and_key(measured)
        output, weights = qkv.attention_with_weights(
            query, key, measured.unsqueeze(1), alibi_slopes=self.slope
        )
        return output.squeeze(1), weights.squeeze(1)


def train(steps: int, seed: int = 0) -> tuple[LearnedSmoothing, GaussianSmoothing]:
    """Both are trained on the same series: the one has 2 Linear layers' numbers to find, the other
    its width."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    learned, bell = LearnedSmoothing(), GaussianSmoothing(3.0, trainable=True)
    adam = torch.optim.Adam(
        [{"params": learned.parameters(), "lr": 3e-3}, {"params": bell.parameters(), "lr": 2e-2}]
    )
    for _ in range(steps):
        true, measured = draw_series(32, generator)
        smoothed = learned(measured)[0], bell(measured)
        adam.zero_grad()
        sum((x - true).square().mean() for x in smoothed).backward()
        adam.step()
    return learned, bell


@dataclass(frozen=True)
class Smoothed:
    """One series that neither was trained on. Errors are root mean squares over 200 others."""

    true: Tensor  # [L]
    measured: Tensor  # [L]
    by_bell: Tensor  # [L]
    learned: Tensor  # [L]
    sigma: float
    place: int  # the last one before the largest jump
    bell_weights: Tensor  # [L], of that place
    learned_weights: Tensor  # [L], likewise
    noise_error: float
    bell_error: float
    learned_error: float


@torch.no_grad()
def smooth(learned: LearnedSmoothing, bell: GaussianSmoothing) -> Smoothed:
    true, measured = draw_series(200, torch.Generator().manual_seed(1_000_003))
    (by_bell, bell_weights), (by_learning, weights) = (
        bell(measured, need_weights=True),
        learned(measured),
    )
    errors = [(x - true).square().mean().sqrt().item() for x in (measured, by_bell, by_learning)]
    jumps = true[0, :, 0].diff().abs()
    jumps[:15] = jumps[-15:] = 0  # one with room on both sides
    place = int(jumps.argmax())
    return Smoothed(
        true[0, :, 0], measured[0, :, 0], by_bell[0, :, 0], by_learning[0, :, 0],
        bell.sigma.item(), place, bell_weights[0, place].float(), weights[0, place], *errors,
    )  # fmt: skip


def draw_smoothed(s: Smoothed):
    figure, rows = picture(4.2, nrows=2, sharex=True, sharey=True)
    for axes, smoothed, colour, title in (
        (rows[0], s.by_bell, ORANGE, f"Bell curve, sigma {s.sigma:.2f}"),
        (rows[1], s.learned, BLUE, "Learned attention"),
    ):
        axes.plot(s.measured, ".", color=GREY, ms=3, label="measured")
        axes.plot(s.true, color="black", lw=1, ls="--", label="true")
        axes.plot(smoothed, color=colour, lw=1.8, label="smoothed")
        axes.axvline(s.place, color=RED, lw=0.8)
        axes.set_title(title)
    rows[1].set_xlabel("place in the series")
    rows[0].legend(ncols=3, loc="upper right", handlelength=1.2, columnspacing=1, borderpad=0)
    low, high = rows[0].get_ylim()
    rows[0].set_ylim(low, high + 0.25 * (high - low))
    return figure


def draw_weights(s: Smoothed):
    figure, axes = picture(2.5)
    near = slice(max(0, s.place - 14), s.place + 15)
    places = range(near.start, near.start + len(s.bell_weights[near]))
    axes.plot(places, s.bell_weights[near], "o-", ms=3, color=ORANGE, label="bell curve")
    axes.plot(places, s.learned_weights[near], "o-", ms=3, color=BLUE, label="learned")
    axes.axvline(s.place, color=RED, lw=0.8, label="the query")
    axes.axvspan(s.place + 0.5, near.stop - 1, color=GREY, alpha=0.15, lw=0, label="after the jump")
    axes.set(xlabel="place of the key", ylabel="weight", ylim=(0, None))
    axes.legend(loc="upper left")
    return figure


def chapter(steps: int) -> Chapter:
    smoothed = smooth(*train(steps))
    return Chapter(
        {
            "sigma": smoothed.sigma,
            "noise": smoothed.noise_error,
            "bell": smoothed.bell_error,
            "learned": smoothed.learned_error,
            "beyond_bell": float(smoothed.bell_weights[smoothed.place + 1 :].sum()),
            "beyond_learned": float(smoothed.learned_weights[smoothed.place + 1 :].sum()),
        },
        {"smoothing": draw_smoothed(smoothed), "smoothing_weights": draw_weights(smoothed)},
    )
