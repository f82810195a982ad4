#!/usr/bin/env python
"""Which digit does each pixel belong to: a model whose pixels see 7 x 7 others, or all of them.

It shows qkv.Spans.neighborhood: a query of attention is a pixel, and sees those around it. Images
are a canvas on which handwritten digits stand anywhere. The same model is trained twice, with
neighbourhood attention and with dense attention, and both then read canvases that are larger than
those they were trained on. A table has what a step takes in each, and on torch's attention.

It needs scikit-learn, which ships the digits, matplotlib and tabulate. Pictures of what a pixel
sees are written to neighborhood.png.

    python examples/neighborhood.py
"""

import multiprocessing
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from matplotlib import colormaps
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from tabulate import tabulate
from torch import Tensor, nn

import qkv
from arguments import make_parser
from forces import memory_of
from qkv.bench.measure import measure
from vit_digits import load_images

KERNEL = 7  # pixels on the side of what a pixel sees
SIDE, LARGE, DIGIT = 32, 64, 8  # pixels on the sides of canvases and of a digit
WIDTH, HEADS, LAYERS = 64, 4, 3
BATCH = 4
BACKGROUND = 10  # the class of a pixel that belongs to no digit
TEST_DIGITS, TEST_IMAGES = 360, 16

KINDS = {"neighbourhood": True, "dense": False}  # whether Spans say what a pixel sees


def compose(sprites: Tensor, digits: Tensor, count: int, side: int) -> tuple[Tensor, Tensor]:
    """Canvases [count, side, side] with a digit in nine of ten cells of 10 x 10 pixels, moved by
    up to two pixels, and with noise; and the class of each pixel, 0 to 10."""
    cell = DIGIT + 2
    canvas = torch.zeros(count, side, side)
    labels = torch.full((count, side, side), BACKGROUND)
    for image in range(count):
        cells = torch.cartesian_prod(*[torch.arange(0, side - cell + 1, cell)] * 2)
        cells = cells[torch.rand(len(cells)) < 0.9]
        for (y, x), which in zip(
            cells + torch.randint(3, cells.shape),
            torch.randint(len(digits), (len(cells),)),
            strict=True,
        ):
            place = (image, slice(y, y + DIGIT), slice(x, x + DIGIT))
            canvas[place] = sprites[which]
            labels[place] = torch.where(sprites[which] > 0.2, digits[which], BACKGROUND)
    return canvas + 0.1 * torch.randn_like(canvas), labels


def what_is_seen(side: int) -> qkv.Spans:
    """Made once for all layers, heads, images and steps: KERNEL intervals for each pixel."""
    return qkv.Spans.neighborhood((side, side), KERNEL)


def turned(x: Tensor, side: int) -> Tensor:
    """Rotary positions in two dimensions, [..., side * side, D]: half of the numbers turn with the
    pixel's row, half with its column, so that scores see how far apart two pixels are, and on
    which side. It is the same on a canvas of any size."""
    D = x.size(-1)
    frequency = torch.logspace(0, -1, D // 4)
    places = torch.arange(side).expand(side, side)
    angle = torch.cat([axis.reshape(-1, 1) * frequency for axis in (places.T, places)], 1)
    a, b = x.unflatten(-1, (D // 2, 2)).unbind(-1)
    cos, sin = angle.cos(), angle.sin()
    return torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.norm_mlp = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.to_qkv, self.merge = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)
        )

    def heads(self, h: Tensor, side: int) -> tuple[Tensor, Tensor, Tensor]:
        """query, key and value, [B, HEADS, side * side, D]."""
        q, k, v = self.to_qkv(self.norm(h)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        return turned(q, side), turned(k, side), v

    def forward(self, h: Tensor, side: int, attention) -> Tensor:
        h = h + self.merge(attention(*self.heads(h, side)).transpose(1, 2).flatten(2))
        return h + self.mlp(self.norm_mlp(h))


class Reader(nn.Module):
    """Canvases [B, side, side] in, logits [B, 11, side, side] of each pixel's class out."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Conv2d(1, WIDTH, 3, padding=1)  # a pixel and its neighbours
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.to_logits = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, BACKGROUND + 1))

    def forward(self, canvas: Tensor, attention) -> Tensor:
        side = canvas.size(-1)
        h = self.embed(canvas[:, None]).flatten(2).transpose(1, 2)
        for layer in self.layers:
            h = layer(h, side, attention)
        return self.to_logits(h).transpose(1, 2).unflatten(-1, (side, side))


def seen_by(kind: str, side: int) -> dict:
    return {"spans": what_is_seen(side)} if KINDS[kind] else {}


def train(kind: str, sprites: Tensor, digits: Tensor, steps: int) -> Reader:
    model, attention = Reader(), partial(qkv.attention, **seen_by(kind, SIDE))
    optimizer = torch.optim.AdamW(model.parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 6e-3, steps)
    for step in range(steps):
        canvas, labels = compose(sprites, digits, BATCH, SIDE)
        loss = F.cross_entropy(model(canvas, attention), labels)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 100 == 0 or step == steps - 1:
            print(f"{kind}, step {step:4}: loss {loss.item():.3f}")
    return model


@torch.no_grad()
def share_read(model: Reader, kind: str, canvas: Tensor, labels: Tensor) -> float:
    """Of the pixels of digits, those that are given to the right one of ten digits."""
    attention = partial(qkv.attention, **seen_by(kind, canvas.size(-1)))
    answers = torch.cat([model(part, attention).argmax(1) for part in canvas.split(BATCH)])
    return (answers == labels)[labels != BACKGROUND].float().mean().item()


def ways(side: int) -> dict[str, Callable]:
    """What computes attention: on torch, a boolean mask of all pairs says what a pixel sees."""
    sdpa = F.scaled_dot_product_attention
    spans = what_is_seen(side)
    return {
        "neighbourhood, qkv.Spans": partial(qkv.attention, spans=spans),
        "neighbourhood, torch with a mask": partial(sdpa, attn_mask=spans.to_mask(side * side)),
        "dense, qkv": qkv.attention,
        "dense, torch": sdpa,
    }


def step(model: Reader, canvas: Tensor, attention) -> None:
    """A forward and backward pass of one canvas."""
    model(canvas, attention).square().mean().backward()


def time_steps(side: int) -> dict[str, float]:
    """{way: ms of a step}, medians."""
    model, canvas = Reader(), torch.rand(1, side, side)
    calls = {way: partial(step, model, canvas, attention) for way, attention in ways(side).items()}
    samples = measure(calls, seconds=0, repeats=4)["samples_s"]
    return {way: 1e3 * statistics.median(seconds) for way, seconds in samples.items()}


def memory_of_step(way: str, side: int) -> float:
    """MiB by which one step adds to this process at its peak."""
    model = Reader()
    step(model, torch.rand(1, DIGIT, DIGIT), ways(DIGIT)[way])  # starts the threads
    attention = ways(side)[way]
    return memory_of(lambda: step(model, torch.rand(1, side, side), attention))


def compare(shares: dict[str, tuple[float, float]]) -> str:
    """A table of all ways; `shares` are of the two that are trained, on both sizes of canvas."""
    rows = []
    times = [time_steps(side) for side in (SIDE, LARGE)]
    for way in times[0]:
        with multiprocessing.get_context("spawn").Pool(1) as process:
            memory = process.apply(memory_of_step, (way, LARGE))
        kind, _, on = way.partition(", ")
        read = [f"{share:.1%}" for share in shares[kind]] if on.startswith("qkv") else ["", ""]
        rows.append((way, *(t[way] for t in times), memory, *read))
    small, large = (f"{side} x {side}" for side in (SIDE, LARGE))
    heads = (
        "",
        f"a step, ms\n{small}",
        f"\n{large}",
        f"MiB\n{large}",
        f"read\n{small}",
        f"\n{large}",
    )
    return tabulate(rows, heads, floatfmt=".0f")


@torch.no_grad()
def weights_of(model: Reader, canvas: Tensor, pixels: list[tuple[int, int]]) -> Tensor:
    """[pixels, side, side]: what some pixels of a canvas look at in the last layer, the mean of its
    heads. Only their queries are asked: the spans have a row for each query, as a mask has."""
    side = canvas.size(-1)
    places = torch.tensor([y * side + x for y, x in pixels])
    spans = what_is_seen(side)
    found = []

    def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        rows = qkv.Spans(spans.tensor[..., places, :])
        asked = query[:, :, places]
        found.append(qkv.attention_weights(asked, key, spans=rows, reduce="heads"))
        return qkv.attention(query, key, value, spans=spans)

    model(canvas[None], attention)
    return found[-1][0].unflatten(-1, (side, side))


def draw(path: Path, model: Reader, canvas: Tensor, labels: Tensor) -> None:
    """Of one canvas: its pixels, their classes, the model's answer; and what three pixels see."""
    side = canvas.size(-1)
    ink = (labels != BACKGROUND).nonzero()
    middle = ink[(ink - side // 2).abs().sum(1).argmin()].tolist()
    pixels = [tuple(middle), (0, 0), (side // 2, side - 1)]
    with torch.no_grad():
        answer = model(canvas[None], partial(qkv.attention, spans=what_is_seen(side)))[0].argmax(0)
    figure = Figure(figsize=(11, 7.4), layout="constrained")
    above, below = figure.subplots(2, 3)
    colours = ListedColormap([*colormaps["tab10"].colors, (1, 1, 1)])
    above[0].imshow(canvas, cmap="gray_r")
    above[0].set_title("A canvas")
    for axes, classes, title in zip(
        above[1:], (labels, answer), ("Its digits", "The model's"), strict=True
    ):
        image = axes.imshow(classes, cmap=colours, vmin=-0.5, vmax=10.5)
        axes.set_title(title)
    figure.colorbar(image, ax=above[2], ticks=range(10), shrink=0.8)
    names = ("in the middle", "at a corner", "at an edge")
    for axes, weights, (y, x), name in zip(
        below, weights_of(model, canvas, pixels), pixels, names, strict=True
    ):
        axes.imshow(canvas, cmap="gray_r", vmax=3)
        axes.imshow(weights.where(weights > 0, torch.nan), cmap="viridis")
        axes.plot(x, y, "s", mfc="none", mec="#e8590c", mew=2, ms=8)
        axes.set_title(f"What the pixel {name} looks at")
    for axes in (*above, *below):
        axes.set(xticks=[], yticks=[])
    figure.savefig(path, dpi=100)


def main(argv: list[str] | None = None) -> dict[str, tuple[float, float]]:
    """Returns, of either kind of attention, the share of the digits' pixels that are read correctly
    on canvases of the size that it was trained on, and on larger ones."""
    args = make_parser(__doc__, steps=300, picture="neighborhood.png").parse_args(argv)

    torch.manual_seed(args.seed)
    images, digits = load_images()
    sprites = (images + 1) / 2  # pixels from 0 to 1
    kept_back = sprites[:TEST_DIGITS], digits[:TEST_DIGITS]
    tests = [compose(*kept_back, TEST_IMAGES, side) for side in (SIDE, LARGE)]
    models, shares = {}, {}
    for kind in KINDS:
        torch.manual_seed(args.seed)  # the same first weights and the same canvases
        models[kind] = train(kind, sprites[TEST_DIGITS:], digits[TEST_DIGITS:], args.steps)
        shares[kind] = tuple(share_read(models[kind], kind, *test) for test in tests)
    print(compare(shares))
    draw(args.picture, models["neighbourhood"], *(part[0] for part in tests[0]))
    return shares


if __name__ == "__main__":
    main()
