"""The tables of score programs: a row for each sample, or the rows of each, one after the other."""

from typing import Any

import torch
from torch import Tensor

from qkv._vmap.samples import Samples

TABLES = ("score_tables", "score_indices", "score_tables_tangent")


def tables(samples: Samples, options: dict[str, Any]) -> dict[str, Tensor]:
    """Batch items are numbered from 0 in the part that has a row of tables, so that there are rows
    even where a program reads none."""
    if not options.get("score_program"):
        return {}
    found = {}
    for name in TABLES:
        if name in samples.values:
            rows = samples.each(name)
            found[name] = rows.flatten(0, 1) if rows.dim() == 3 else rows
    if not found:
        device = samples.values["query"].device
        found["score_indices"] = torch.empty(samples.size, 0, dtype=torch.int32, device=device)
    return found


def gradient(samples: Samples, rows: Tensor, name: str) -> Tensor:
    """[size, ...], of a sample's own shape."""
    return rows.reshape(samples.each(name).shape)
