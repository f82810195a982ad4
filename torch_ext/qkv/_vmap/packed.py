"""Packed documents: those of all samples, one sample after the other.

Sample b has the rows from b * T on, and its documents are followed by two more, which see no keys:
the rows of the sample after its last document, and those of the next sample before its first one.
Both are usually empty. There are as many more documents as make the parts equal that have a seed
(seeds.py), or a row of tables (samples.py).
"""

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from qkv._vmap import seeds
from qkv._vmap.cache import Pool
from qkv._vmap.levels import put_together
from qkv._vmap.samples import Samples, flat, refuse_int8
from qkv.options import BY_HEAD, MASKS

_ROWS = ("query", "key", "value", "output")
_ROWS_IN_SECOND = ("logsumexp", "softmax_lse")  # [H, T]


def laid_out_like(name: str) -> str:
    """The tensor of which this one is a gradient or a tangent, or both; or it itself."""
    while name.startswith("grad_"):
        name = name.removeprefix("grad_")
    return name.removesuffix("_tangent")


class _Documents:
    """Of all samples. count: those of one sample; gaps: what is added to them."""

    def __init__(self, samples: Samples, options: dict[str, Any]):
        self.samples = samples
        ends = samples.each("cu_seq_q")
        self.count = ends.size(1) - 1
        self.seeds = seeds.of(samples, options)
        self.tables = samples.tables(options)  # [size, R, N]
        seeds_of = 1 if self.seeds is None else self.seeds.size(1)
        rows_of = max([rows.size(1) for rows in self.tables.values()], default=1)
        # Of samples within samples: the documents that have a seed, or a row, are equally many.
        parts = [max(self.count // n, 1) for n in (seeds_of, rows_of) if n > 1]
        self.gaps = math.lcm(*parts) * -(-2 // math.lcm(*parts))
        if self.seeds is not None and seeds_of > 1:
            self.seeds = pad(self.seeds, (0, self.gaps // max(self.count // seeds_of, 1)))
        for name, rows in self.tables.items() if rows_of > 1 else ():
            more = self.gaps // max(self.count // rows_of, 1)
            self.tables[name] = pad(rows.expand(-1, rows_of, -1), (0, 0, 0, more))

    def boundaries(self, name: str, rows: int) -> Tensor:
        """cu_seq_q or cu_seq_k, of samples that have so many rows."""
        ends = self.samples.each(name)
        begins = torch.arange(self.samples.size, device=ends.device)[:, None] * rows
        ends = torch.cat([ends + begins, (begins + rows).expand(-1, self.gaps - 1)], 1)
        return torch.cat([ends.flatten(), ends.new_full((1,), self.samples.size * rows)])

    def padded(self, tensor: Tensor, dims_after: int, value: float = 0) -> Tensor:
        """[size, count, ...], with so many dimensions after these, for documents and gaps:
        [size * (count + gaps), ...]."""
        return pad(tensor, (0, 0) * dims_after + (0, self.gaps), value=value).flatten(0, 1)


def _options(documents: _Documents, wanted: tuple[str, ...]) -> dict[str, Tensor]:
    """The masks, slopes and sinks of all documents, and their tangents. wanted: those whose
    gradients are."""
    samples, tensors = documents.samples, {}
    for option in (*MASKS, *BY_HEAD):
        dims_after = 3 if option in MASKS else 1
        given = [n for n in (option, f"{option}_tangent") if n in samples.values]
        is_one = all(samples.is_one_for_all(n, dims_after) for n in given)
        for name in given:
            if option in MASKS and option not in wanted and is_one:
                tensors[name] = samples.values[name]
                continue
            of_documents = samples.of_items(name, documents.count, dims_after)
            # A sink of -inf is none, so that the lse of a gap is that of rows without a document.
            value = -torch.inf if name == "sinks" else 0
            tensors[name] = documents.padded(of_documents, dims_after, value)
    return tensors


def rule(op: Any, samples: Samples, options: dict[str, Any]):
    refuse_int8(samples, "varlen_attention")
    documents = _Documents(samples, options)
    results = zip(op._schema.returns, options.get("output_mask", ()), strict=False)
    wanted = tuple(r.name.removeprefix("grad_") for r, is_wanted in results if is_wanted)
    tensors: dict[str, Tensor | None] = {}
    is_paged = "block_table" in samples.values  # key and value are blocks
    for name in samples.values:
        if laid_out_like(name) in (("query",) if is_paged else _ROWS):
            tensors[name] = samples.rows(name)
        elif laid_out_like(name) in _ROWS_IN_SECOND:
            tensors[name] = samples.each(name).transpose(0, 1).flatten(1, 2)
    tensors |= _options(documents, wanted) | flat(documents.tables)
    tensors["cu_seq_q"] = documents.boundaries("cu_seq_q", samples.each("query").size(1))
    cu_seq_k = "cu_seq_k" if "cu_seq_k" in samples.values else "cu_seq_q"
    if is_paged:
        pool = Pool(samples, ("key", "value"), samples.each("block_table"))
        assert pool.index is not None
        tensors |= pool.tensors | {"block_table": documents.padded(pool.index, 1)}
        tensors["cu_seq_k"] = None
    else:
        tensors["dropout_seed"] = None if documents.seeds is None else documents.seeds.flatten()
        tensors["cu_seq_k"] = documents.boundaries(cu_seq_k, samples.each("key").size(1))
    lengths = "seqused_k" in samples.values
    used = samples.each("seqused_k") if lengths else samples.each(cu_seq_k).diff(dim=1)
    tensors["seqused_k"] = documents.padded(used, 0)
    results = op(**options | tensors)
    results = put_together(op, results, lambda n, x: _result(documents, laid_out_like(n), x))
    return results, tuple(None if x is None else 0 for x in results)


def _result(documents: _Documents, name: str, x: Tensor) -> Tensor:
    """A result as the function under vmap sees it, [size, ...]."""
    samples = documents.samples
    if name == "score_tables":
        return samples.own(name, x)
    if name in (*MASKS, *BY_HEAD):
        return samples.own(name, x, documents.count)
    rows = samples.each(name if name in ("key", "value") else "query").size(1)
    if name in _ROWS_IN_SECOND:
        return x.unflatten(1, (samples.size, rows)).movedim(1, 0)
    return x.unflatten(0, (samples.size, rows))
