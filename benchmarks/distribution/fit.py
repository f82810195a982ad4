"""From what two ranks measured to the figures that the model is made of."""

from statistics import median

import torch

from .cost import FLOPS
from .figures import Core, Layer, Link, Pass


def fit(samples: list[dict], layer: Layer) -> Core:
    """samples: of measure.steps(). Each is "forward" or "backward" ("pass") of one length, with the
    seconds of "compute", of "own", of "transport" and of "both" at once, and the "bytes" moved."""
    passes = {name: fit_pass(name, samples, layer) for name in FLOPS}
    moved = [([1.0, s["bytes"]], s["transport"]) for s in samples]
    latency, seconds_per_byte = nonnegative(moved)
    lost = [
        (s["both"] - s["compute"]) / s["bytes"] for s in samples if s["compute"] >= s["transport"]
    ]  # where transport is what takes longer, the rest of its time would be counted too
    return Core(
        passes["forward"],
        passes["backward"],
        Link(1 / seconds_per_byte, latency),
        max(0.0, median(lost)) if lost else seconds_per_byte,
    )


def fit_pass(name: str, samples: list[dict], layer: Layer) -> Pass:
    measured = []
    for sample in samples:
        if sample["pass"] == name:
            elements = sample["rows"] * layer.heads * layer.head_dim
            flops = FLOPS[name] * sample["rows"] * elements / 2
            measured.append(([1.0, elements, flops], sample["compute"]))
    causal = median(s["own"] / s["compute"] for s in samples if s["pass"] == name)
    fixed, element, flop = nonnegative(measured)
    return Pass(fixed, element, flop, causal)


def nonnegative(measured: list[tuple[list[float], float]]) -> list[float]:
    """The factors, none below 0, whose sums of (factor times term) come closest to the seconds:
    (terms, seconds) in, with errors relative to the seconds. A term that would count negative is
    left out."""
    rows = torch.tensor([terms for terms, _ in measured], dtype=torch.float64)
    seconds = torch.tensor([s for _, s in measured], dtype=torch.float64)
    scale = rows.amax(0)  # so that the terms are of one size
    relative = rows / scale / seconds[:, None]
    kept = list(range(rows.size(1)))
    while True:
        ones = torch.ones_like(seconds)
        found = torch.linalg.lstsq(relative[:, kept], ones, driver="gelsd").solution
        if (found >= 0).all():
            break
        del kept[int(found.argmin())]
    factors = [0.0] * rows.size(1)
    for which, factor in zip(kept, (found / scale[kept]).tolist(), strict=True):
        factors[which] = factor
    return factors
