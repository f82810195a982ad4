"""What a score program computes, by torch: what `trace` is held against."""

from typing import NamedTuple

import torch

from qkv._score_function.cache import traced

TWO = {
    "add": torch.add, "sub": torch.sub, "mul": torch.mul, "div": torch.div, "neg": torch.neg,
    "min": torch.minimum, "max": torch.maximum, "floordiv": torch.floor_divide, "abs": torch.abs,
    "rem": torch.remainder, "and": torch.bitwise_and, "or": torch.bitwise_or,
    "xor": torch.bitwise_xor,
    "not": torch.bitwise_not, "shl": torch.bitwise_left_shift, "shr": torch.bitwise_right_shift,
}  # fmt: skip
NUMBERS = {"float": torch.float64, "int": torch.int32}


class ScoreProgram(NamedTuple):
    """text: tables, then instructions, a line each.
    tables: all floating tables one after the other, float32 or float64. None: there are none.
    indices: all tables of integers and booleans, int32.
    """

    text: str
    tables: torch.Tensor | None
    indices: torch.Tensor | None


def trace(score_mod, dtype):
    """The program of a score function with its tables, for query's dtype."""
    program, captured = traced(score_mod, dtype)
    return ScoreProgram(program.text, *program.tables(captured, score_mod))


def evaluated(program, scores):
    """scores: `[B, H, L, S]`, float64."""
    places = torch.meshgrid(
        *(torch.arange(n, dtype=torch.int32) for n in scores.shape), indexing="ij"
    )
    leaves = dict(zip(("batch", "head", "query", "key"), places, strict=True)) | {"score": scores}
    tables, values = [], []
    for line in program.text.splitlines():
        name, *args = line.split()
        if name[0] == "@":
            offset, *sizes = map(int, args)
            joined = program.tables if name == "@float" else program.indices
            n = torch.Size(sizes).numel()
            tables.append(joined[offset : offset + n].view(sizes))
        elif name in NUMBERS:
            values.append(torch.tensor(float(args[0])).double().to(NUMBERS[name]))
            if name == "float":
                values[-1] = torch.tensor(float(args[0]), dtype=torch.float64)
        elif name == "bool":
            values.append(torch.tensor(args[0] == "1"))
        elif name in leaves:
            values.append(leaves[name])
        elif name == "load":
            table = tables[int(args[0])]
            at = [values[int(x)].long().expand(scores.shape) for x in args[1:]]
            is_in = [(x >= -n) & (x < n) for x, n in zip(at, table.shape, strict=True)]
            found = table[tuple(torch.where(y, x, 0) for x, y in zip(at, is_in, strict=True))]
            outside = float("nan") if table.is_floating_point() else 0
            for x in is_in:
                found = torch.where(x, found, torch.tensor(outside, dtype=table.dtype))
            values.append(found)
        else:
            values.append(computed(name, *(values[int(x)] for x in args)))
    return values[-1].expand_as(scores)


def computed(name, *inputs):
    kinds = {x.dtype for x in (inputs[1:] if name == "where" else inputs)}
    assert len(kinds) == 1, (name, kinds)
    if name == "to_float":
        return inputs[0].double()
    if name == "to_int":
        return inputs[0].int()
    return TWO.get(name, getattr(torch, name, None))(*inputs)
