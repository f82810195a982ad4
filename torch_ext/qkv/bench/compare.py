"""A run beside an earlier one of the same shapes: what each shape took then, and takes now."""

from . import columns
from .columns import ROW, by_direction, milliseconds_cell, ratio_cell
from .table import Column, Table, machine_lines

SAME = ("cpu", "threads", "isa")  # where one of them differs, only ratios compare


def key(row):
    return row["option"], row["shape"], row["dtype"]


def expect_common(planned, then, path):
    """Raises ValueError if the run `then`, which path holds, has none of the key()s in planned."""
    found = set(map(key, then["results"]))
    if planned.isdisjoint(found):
        wanted, had = ("; ".join(sorted(map(" ".join, keys))) for keys in (planned, found))
        raise ValueError(f"--compare: {path} has none of: {wanted}. It has: {had}")


def rows(now, then):
    """by_direction() of what both runs have; with "then", what was found in that direction."""
    before = {(*key(row), row["direction"]): row for row in by_direction(then, then["results"])}
    return [
        row | {"then": before[place][ROW]}
        for row in by_direction(now, now["results"])
        if (place := (*key(row), row["direction"])) in before
    ]


def table(now, then):
    """Milliseconds then and now, and by how much they grew; and the ratio to torch, which holds on
    other machines too."""
    found = [*columns.shape(), columns.dtype(), columns.direction("pass")]
    for name, whose in (("qkv", ""), ("torch", "torch's ")):
        found += [
            Column(f"{whose}ms then", milliseconds_cell("then", name)),
            Column("now", milliseconds_cell(ROW, name)),
            Column("now / then", growth(name), is_bold=True),
        ]
    found += [
        Column("× torch then", ratio_cell("then", "ratio")),
        Column("now", ratio_cell(ROW, "ratio")),
    ]
    return Table(found, rows(now, then), caption(now, then))


def growth(name):
    def cell(row):
        if name not in row[ROW] or name not in row["then"]:
            return ""
        now, then = (row[when][name]["seconds"]["median"] for when in (ROW, "then"))
        return f"{now / then:.2f}"

    return cell


def caption(now, then):
    """What the earlier run was on, and what therefore compares."""
    lines = ["Then: " + machine_lines(then)[0]]
    other = [name for name in SAME if now["machine"][name] != then["machine"][name]]
    if other:
        lines.append(f"Then and now differ in {', '.join(other)}: only × torch compares.")
    return "\n".join(lines)
