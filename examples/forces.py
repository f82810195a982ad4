#!/usr/bin/env python
"""Forces of copper clusters: an attention model of the energy, trained on energies and forces.

The forces are the gradient of the energy with respect to the positions, so training on them takes
second derivatives of attention. Positions reach the model only as a bias on the scores, a function
of the distance of each pair. The data come from Gupta's potential, computed in float64, of clusters
that Langevin dynamics heats, each to another temperature.

It needs matplotlib. The same model runs on torch's math path beside it, for time, memory and
agreement, and two pictures are written to forces.png.

    python examples/forces.py
"""

import copy
import ctypes
import math
import multiprocessing
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import qkv
from arguments import make_parser
from qkv.bench.measure import measure

ATOMS = 255  # with the token that is no atom, 256
WIDTH, HEADS, LAYERS = 96, 6, 2
BATCH = 2
CLUSTERS, FRAMES, EVERY = 5, 24, 10  # trajectories, frames that are kept of each, steps to a frame
# Copper, of Cleri and Rosato, Phys. Rev. B 48 (1993): eV, two pure numbers, and angstroms.
A, XI, P, Q, R0 = 0.0855, 1.224, 10.96, 2.278, 2.556
CUTOFF = 3 * R0  # no pair further apart has a part in the model
ACCELERATION = 9.6485e-3 / 63.546  # of a copper atom under 1 eV/angstrom, in angstroms per fs^2
KELVIN, STEP, FRICTION = 8.617e-5, 4.0, 0.01  # in eV; fs; 1/fs


def distances(x: Tensor) -> Tensor:
    """Positions [B, N, 3] in; distances [B, N, N] out, 1 of an atom from itself."""
    square = (x[:, :, None] - x[:, None]).square().sum(-1)
    return (square + torch.eye(x.size(1), dtype=x.dtype)).sqrt()


def gupta(x: Tensor) -> Tensor:
    """The energies [B] that are to be learned: pairs repel, the density around an atom binds it."""
    other = 1 - torch.eye(x.size(1), dtype=x.dtype)
    r = distances(x) / R0 - 1
    density = ((-2 * Q * r).exp() * other).sum(-1)
    return ((A * (-P * r).exp() * other).sum(-1) - XI * density.sqrt()).sum(-1)


def with_forces(energy_of, x: Tensor, **options) -> tuple[Tensor, Tensor]:
    """Energies [B], and forces [B, N, 3]: minus the gradient of the energy."""
    x = x.detach().requires_grad_()
    energy = energy_of(x)
    return energy, -torch.autograd.grad(energy.sum(), x, **options)[0]


def simulate(clusters: int, frames: int) -> tuple[Tensor, Tensor, Tensor]:
    """Positions [clusters, frames, N, 3], energies and forces of clusters that are heated, each to
    a temperature of its own, from 300 K up."""
    grid = torch.cartesian_prod(*[torch.arange(-6.0, 7)] * 3).double()
    grid = grid[grid.sum(-1) % 2 == 0] - torch.tensor([0.5, 0.0, 0.0])
    cut = grid[grid.norm(dim=-1).argsort(stable=True)[:ATOMS]] * R0 / math.sqrt(2)
    x, v = cut.repeat(clusters, 1, 1), torch.zeros(clusters, ATOMS, 3, dtype=torch.float64)
    hottest = torch.linspace(600, 2000, clusters, dtype=torch.float64)[:, None, None]
    keep, kept = math.exp(-FRICTION * STEP), []
    _, force = with_forces(gupta, x)
    for n in range(frames * EVERY):
        kelvin = 300 + (hottest - 300) * n / (frames * EVERY)
        noise = (kelvin * KELVIN * ACCELERATION * (1 - keep**2)).sqrt() * torch.randn_like(v)
        v = (v + STEP / 2 * ACCELERATION * force) * keep + noise
        x = x + STEP * v
        energy, force = with_forces(gupta, x)
        v = v + STEP / 2 * ACCELERATION * force
        if n % EVERY == EVERY - 1:
            kept.append((x, energy.detach(), force))
    return tuple(torch.stack(parts, 1) for parts in zip(*kept, strict=True))


def on_math(*args) -> Tensor:
    """torch's only path that has second derivatives, or a jvp: it holds all scores."""
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(*args)


WAYS = {"qkv": qkv.attention, "torch": on_math}


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.to_qkv, self.merge = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 2 * WIDTH), nn.SiLU(), nn.Linear(2 * WIDTH, WIDTH)
        )
        # A head's bias is a parabola in the distance: at first a line, most heads' a steep one.
        lines = torch.stack([torch.full((HEADS,), -3.0), -torch.linspace(0.2, 1.4, HEADS)], 1)
        self.parabola = nn.Parameter(F.pad(lines, (0, 1)))

    def forward(self, h: Tensor, pairs: Tensor, attention) -> Tensor:
        bias = F.pad(self.parabola, (0, 1), value=1.0) @ pairs.flatten(2)
        bias = bias.unflatten(-1, pairs.shape[-2:])
        q, k, v = self.to_qkv(h).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        h = h + self.merge(attention(q, k, v, bias).transpose(1, 2).flatten(2))
        return h + self.mlp(h)


class Energy(nn.Module):
    """Positions [B, N, 3] in, energies [B] above the training data's mean out. All atoms are alike,
    so beside them there is one token that every atom sees: its share of the weights tells how much
    else there is to see."""

    def __init__(self):
        super().__init__()
        self.token = nn.Parameter(3 * torch.randn(WIDTH))  # an atom begins as zeros
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.to_energy = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.SiLU(), nn.Linear(WIDTH, 1))

    def forward(self, x: Tensor, attention=qkv.attention) -> Tensor:
        batch, atoms, _ = x.shape
        r = distances(x)
        hidden = (r > 0.98 * CUTOFF) | torch.eye(atoms, dtype=torch.bool)
        near = (r / CUTOFF).masked_fill(hidden, 0)
        smooth = (1 - 1 / (1 - near.square())).masked_fill(hidden, -1e4)  # exp() of it fades out
        line = 10 * (near * (CUTOFF / R0) - 1)
        pairs = torch.stack([torch.ones_like(r), line, line * line / 10, smooth], 1)
        pairs = F.pad(pairs, (0, 1, 0, 1))  # the last token sees all and is seen by all: no bias
        h = F.pad(self.token[None], (0, 0, atoms, 0)).expand(batch, -1, -1)
        for layer in self.layers:
            h = layer(h, pairs, attention)
        return self.to_energy(h[:, :atoms]).sum((1, 2))


def loss_of(model, x: Tensor, energy: Tensor, force: Tensor, attention=qkv.attention) -> Tensor:
    """The energy of an atom, in eV, weighs as much as two components of forces, in eV/angstrom."""
    found, forces = with_forces(partial(model, attention=attention), x, create_graph=True)
    return F.mse_loss(forces, force) + 2 * F.mse_loss(found / ATOMS, energy / ATOMS)


def results(model, data: list[Tensor], attention) -> dict[str, Tensor]:
    """Energies, forces, and the gradient of the loss with respect to all parameters."""
    energy, force = with_forces(partial(model, attention=attention), data[0])
    grads = torch.autograd.grad(loss_of(model, *data, attention), [*model.parameters()])
    return {
        "energies": energy.detach(),
        "forces": force,
        "gradients": torch.cat([x.flatten() for x in grads]),
    }


def memory_of(call: Callable) -> float:
    """MiB by which a call adds to this process at its peak."""

    def resident(field: str) -> float:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith(field)) / 1024

    ctypes.CDLL(None).malloc_trim(0)  # so that no memory that was freed before is used again
    Path("/proc/self/clear_refs").write_text("5")  # the peak restarts from what is resident now
    before = resident("VmRSS")
    call()
    return resident("VmHWM") - before


def memory_of_step(way: str) -> float:
    """Of one step, in a process that has not taken any."""
    model, data = Energy(), [part[:, 0].float() for part in simulate(BATCH, 1)]
    small = [part[:, :8] if part.dim() > 1 else part for part in data]
    loss_of(model, *small, WAYS[way]).backward()  # loads the libraries and starts the threads
    return memory_of(lambda: loss_of(model, *data, WAYS[way]).backward())


def compare(model, data: list[Tensor]) -> dict[str, dict[str, float]]:
    """{way: {what: figure}}, printed as a table; the errors are relative to the largest element."""
    exact = results(copy.deepcopy(model).double(), [x.double() for x in data], on_math)
    steps = {n: lambda f=f: loss_of(model, *data, f).backward() for n, f in WAYS.items()}
    samples, table = measure(steps, seconds=0, repeats=5)["samples_s"], {}
    for way, attention in WAYS.items():
        table[way] = {"a step, ms": 1e3 * statistics.median(samples[way])}
        # In a process of its own, so that no memory that was freed before is used again.
        with multiprocessing.get_context("spawn").Pool(1) as process:
            table[way]["a step's memory, MiB"] = process.apply(memory_of_step, (way,))
        for what, x in results(model, data, attention).items():
            error = (x - exact[what]).abs().max() / exact[what].abs().max()
            table[way][f"{what}: error to float64"] = error.item()
    print(f"{'':32}" + "".join(f"{way:>10}" for way in WAYS))
    for what in table["qkv"]:
        print(f"{what:32}" + "".join(f"{table[way][what]:10.3g}" for way in WAYS))
    return table


def draw(path: Path, truth: tuple[Tensor, Tensor], found: tuple[Tensor, Tensor]) -> None:
    """truth and found: energies [frames] and forces [frames, N, 3] along a trajectory."""
    figure = Figure(figsize=(11, 4.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    true, predicted = truth[1].flatten(), found[1].flatten()
    most = true.abs().max().item()
    left.hexbin(true, predicted, gridsize=70, bins="log", cmap="viridis", mincnt=1)
    left.plot([-most, most], [-most, most], color="0.3", lw=0.8)
    left.set(
        xlabel="Gupta's potential, eV/Å", ylabel="model, eV/Å", aspect="equal",
        title="Forces on the atoms of a cluster it was not trained on",
    )  # fmt: skip
    picoseconds = EVERY * STEP / 1000 * torch.arange(1, len(truth[0]) + 1)
    right.plot(picoseconds, truth[0] / ATOMS, color="0.2", lw=2, label="Gupta's potential")
    right.plot(picoseconds, found[0] / ATOMS, "o", color="#d1612a", ms=5, label="model")
    right.set(xlabel="ps", ylabel="eV an atom", title="Its energy while it is heated")
    right.legend(frameon=False)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)


def rms(x: Tensor) -> float:
    return x.square().mean().sqrt().item()


def main(argv: list[str] | None = None) -> tuple[float, dict]:
    """Returns the error of the forces on a cluster that the model was not trained on, relative to
    that of 0 in their place, and the table of the comparison with torch."""
    args = make_parser(__doc__, steps=400, picture="forces.png").parse_args(argv)

    torch.manual_seed(args.seed)
    x, energy, force = simulate(CLUSTERS, FRAMES)
    middle = CLUSTERS // 2  # the one that is kept back
    others = torch.arange(CLUSTERS) != middle
    mean = energy[others].mean()
    data = [part.float() for part in (x, energy - mean, force)]
    test, train = [part[middle] for part in data], [part[others].flatten(0, 1) for part in data]
    model = Energy()
    optimizer = torch.optim.AdamW(model.parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 5e-3, args.steps)
    for step in range(args.steps):
        chosen = torch.randint(len(train[0]), (BATCH,))
        loss = loss_of(model, *(part[chosen] for part in train))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 50 == 0 or step == args.steps - 1:
            print(f"step {step:4}: loss {loss.item():.4f}")

    pieces = [with_forces(model, x) for x in test[0].split(BATCH)]
    energy, force = (torch.cat(parts).detach() for parts in zip(*pieces, strict=True))
    off, none = rms(force - test[2]), rms(test[2])
    print("a cluster that it was not trained on, errors as root mean squares:")
    print(f"    forces {off:.3f} eV/Å, where 0 in their place has {none:.3f}")
    off_energy, spread = (1e3 / ATOMS * rms(x) for x in (energy - test[1], test[1]))
    print(f"    energies {off_energy:.2g} meV an atom, where their mean has {spread:.2g}")
    draw(args.picture, (test[1] + mean, test[2]), (energy + mean, force))
    return off / none, compare(model, [part[:BATCH] for part in train])


if __name__ == "__main__":
    main()
