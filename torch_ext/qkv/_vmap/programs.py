"""The tables of score programs: a row for each sample, or, nested, the rows of each, one sample
after the other."""

from typing import Any

import torch
from torch import Tensor

from qkv._vmap.samples import Samples

TABLES = ("score_tables", "score_indices", "score_tables_tangent")


def tables(samples: Samples, options: dict[str, Any]) -> dict[str, Tensor]:
    """[size, R, N] of each. Batch items are numbered from 0 in the part that has a row of tables,
    so that there are rows even where a program reads none."""
    if not options.get("score_program"):
        return {}
    given = [name for name in TABLES if name in samples.values]
    found = {name: samples.padded(name, 2) for name in given}
    if not found:
        device = samples.values["query"].device
        found["score_indices"] = torch.empty(samples.size, 1, 0, dtype=torch.int32, device=device)
    return found


def flat(tables: dict[str, Tensor]) -> dict[str, Tensor]:
    """As the operators take them."""
    return {name: rows.flatten(0, 1) for name, rows in tables.items()}
