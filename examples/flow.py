#!/usr/bin/env python
"""Handwritten digits in one step: a MeanFlow transformer, whose loss needs a jvp.

A flow carries an image to noise along z = (1 - t) image + t noise, at the velocity noise - image.
The model learns the mean velocity u(z, r, t) from time r to t, so that noise - u(noise, 0, 1) is
an image. Its target has the derivative of u along the path, which torch.func.jvp computes in the
same pass as u itself: Geng and others, "Mean Flows for One-step Generative Modeling" (2025).

It needs scikit-learn, which ships the 1797 images and judges the samples, and matplotlib. At the
end it times a step of training on torch's math path too, and draws samples into flow.png.

    python examples/flow.py
"""

import statistics
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from sklearn.svm import SVC
from torch import Tensor, nn

import qkv
from arguments import make_parser
from forces import WAYS
from qkv.bench.measure import measure
from vit_digits import load_images

PATCH, PATCHES = 2, 16  # pixels on a patch's side; patches in an image
WIDTH, HEADS, LAYERS = 128, 4, 4
BATCH = 64
TEST_IMAGES, ROWS = 360, 8  # the images that are kept back; rows of the picture


class Block(nn.Module):
    """A layer of a diffusion transformer: what it is told of time and digit shifts and scales."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH, elementwise_affine=False)
        self.to_qkv, self.merge = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 3 * WIDTH), nn.GELU(), nn.Linear(3 * WIDTH, WIDTH)
        )
        self.modulate = nn.Linear(WIDTH, 6 * WIDTH)
        nn.init.zeros_(self.modulate.weight)
        nn.init.zeros_(self.modulate.bias)

    def forward(self, h: Tensor, told: Tensor, attention) -> Tensor:
        a, b, c, d, e, f = self.modulate(told)[:, None].chunk(6, -1)
        heads = self.to_qkv(self.norm(h) * (1 + a) + b).unflatten(-1, (3, HEADS, -1))
        output = attention(*heads.permute(2, 0, 3, 1, 4)).transpose(1, 2).flatten(2)
        h = h + c * self.merge(output)
        return h + f * self.mlp(self.norm(h) * (1 + d) + e)


class MeanFlow(nn.Module):
    """Images z [B, 8, 8], times r and t [B] and digits [B] in, mean velocities [B, 8, 8] out."""

    def __init__(self, attention):
        super().__init__()
        self.attention = attention
        self.embed = nn.Linear(PATCH * PATCH, WIDTH)
        self.position = nn.Parameter(0.2 * torch.randn(PATCHES, WIDTH))
        self.digit = nn.Embedding(10, WIDTH)
        self.time = nn.Sequential(nn.Linear(2 * WIDTH, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH))
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.to_pixels = nn.Linear(WIDTH, PATCH * PATCH)
        self.register_buffer("frequency", torch.logspace(-0.5, 1, WIDTH // 2))

    def forward(self, z: Tensor, r: Tensor, t: Tensor, digits: Tensor) -> Tensor:
        angle = torch.stack([t, t - r], 1)[..., None] * self.frequency
        told = self.time(torch.cat([angle.sin(), angle.cos()], -1).flatten(1)) + self.digit(digits)
        patches = z.unflatten(2, (4, PATCH)).unflatten(1, (4, PATCH)).transpose(2, 3)
        h = self.embed(patches.flatten(3).flatten(1, 2)) + self.position
        for block in self.blocks:
            h = block(h, F.silu(told), self.attention)
        pixels = self.to_pixels(self.norm(h)).view(-1, 4, 4, PATCH, PATCH)
        return pixels.transpose(2, 3).reshape(z.shape)


def error_of(model: nn.Module, images: Tensor, digits: Tensor) -> Tensor:
    """The square error [B] of images [B, 8, 8] of digits [B]; noise and times are drawn here."""
    batch = len(images)
    times = (torch.randn(2, batch) - 0.4).sigmoid()
    t = times.amax(0)
    r = torch.where(torch.rand(batch) < 0.5, times.amin(0), t)  # half learn the velocity itself
    noise = torch.randn_like(images)
    z, velocity = torch.lerp(images, noise, t[:, None, None]), noise - images
    u, along = torch.func.jvp(
        lambda z, r, t: model(z, r, t, digits),
        (z, r, t),
        (velocity, torch.zeros(batch), torch.ones(batch)),
    )
    # u = velocity - (t - r) du/dt holds of the mean velocity; the right side is the target.
    return (u - velocity + (t - r)[:, None, None] * along.detach()).square().sum((1, 2))


@torch.no_grad()
def sample(model: nn.Module, digits: Tensor, since: float = 0.0) -> Tensor:
    """Images [B, 8, 8] of digits [B], in one step of the mean velocity from time `since` to 1."""
    noise, one = torch.randn(len(digits), 8, 8), torch.ones(len(digits))
    return (noise - model(noise, since * one, one, digits)).clamp(-1, 1)


def distance(a: Tensor, b: Tensor) -> float:
    """Of two sets of images: Fréchet's, between the Gaussians of their means and covariances."""
    a, b = (x.flatten(1).double() for x in (a, b))
    (mean_a, cov_a), (mean_b, cov_b) = ((x.mean(0), x.T.cov()) for x in (a, b))
    both = torch.linalg.eigvals(cov_a @ cov_b).sqrt().real.sum()
    return ((mean_a - mean_b).square().sum() + (cov_a + cov_b).trace() - 2 * both).item()


def time_steps(model: nn.Module, images: Tensor, digits: Tensor) -> dict[str, float]:
    """{way: seconds a step}, medians, in turn."""

    def step(attention) -> None:
        model.attention = attention
        error_of(model, images, digits).sum().backward()

    calls = {way: partial(step, attention) for way, attention in WAYS.items()}
    samples = measure(calls, seconds=0, repeats=10)["samples_s"]
    return {way: statistics.median(seconds) for way, seconds in samples.items()}


def draw(path: Path, found: Tensor, real: Tensor) -> None:
    """Two sets of images [10, rows, 8, 8], a column for each digit."""
    figure = Figure(figsize=(10, 4.3), layout="constrained")
    titles = ("One step of the model", "Images that it was not trained on")
    for axes, images, title in zip(figure.subplots(1, 2), (found, real), titles, strict=True):
        framed = F.pad(images, (1, 1, 1, 1), value=-1).permute(1, 2, 0, 3).flatten(2).flatten(0, 1)
        axes.imshow(framed.numpy(), cmap="gray_r")
        axes.set_title(title)
        axes.set_axis_off()
    figure.savefig(path, dpi=110)


def main(argv: list[str] | None = None) -> tuple[float, dict[str, float]]:
    """Returns the share of samples that a classifier takes for the digit that was asked for, and
    how far they, and others, are from images that the model was not trained on."""
    args = make_parser(__doc__, steps=1000, picture="flow.png").parse_args(argv)

    torch.manual_seed(args.seed)
    images, digits = load_images()
    test, train = images[:TEST_IMAGES], images[TEST_IMAGES:]
    model = MeanFlow(qkv.attention)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, args.steps, pct_start=0.1)
    for step in range(args.steps):
        chosen = torch.randint(TEST_IMAGES, len(images), (BATCH,))
        error = error_of(model, images[chosen], digits[chosen])
        optimizer.zero_grad()
        (error / (error.detach() + 0.01)).mean().backward()  # so that none outweighs the others
        optimizer.step()
        schedule.step()
        if step % 250 == 0 or step == args.steps - 1:
            print(f"step {step:4}: error {error.mean().item():.1f}")

    asked = torch.arange(10).repeat_interleave(TEST_IMAGES // 10)
    model.eval()
    samples = sample(model, asked)
    judge = SVC().fit(images[TEST_IMAGES:].flatten(1), digits[TEST_IMAGES:])
    share, of_test = (
        judge.score(x.flatten(1), y) for x, y in ((samples, asked), (test, digits[:TEST_IMAGES]))
    )
    print(f"a classifier takes {share:.1%} of the samples for the digit that was asked for, and")
    print(f"    {of_test:.1%} of the images that neither of them was trained on for what they are")
    far = {
        "samples": distance(samples, test),
        "one step of the velocity itself": distance(sample(model, asked, since=1.0), test),
        "noise": distance(torch.randn_like(test).clamp(-1, 1), test),
        "what it was trained on": distance(train, test),
    }
    listed = ", ".join(f"{name} {x:.2f}" for name, x in far.items())
    print(f"Fréchet distances from these images: {listed}")
    seconds = time_steps(model, images[:BATCH], digits[:BATCH])
    print("a step: " + ", ".join(f"{1e3 * x:.1f} ms on {way}" for way, x in seconds.items()))
    real = torch.stack([test[digits[:TEST_IMAGES] == digit][:ROWS] for digit in range(10)])
    draw(args.picture, samples.view(10, -1, 8, 8)[:, :ROWS], real)
    return share, far


if __name__ == "__main__":
    main()
