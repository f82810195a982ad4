"""Tables of a run as text: lists of columns, which tabulate sets for a terminal or for a page."""

from collections.abc import Callable
from dataclasses import dataclass, field

from .report import notes


@dataclass(frozen=True)
class Column:
    """cell: row -> text, where a row is a result of a run, perhaps with more entries."""

    title: str  # a line break in it is a blank in markdown
    cell: Callable[[dict], str]
    is_text: bool = False  # flush left
    is_bold: bool = False  # in markdown, up to the first blank


@dataclass(frozen=True)
class Table:
    columns: list[Column]
    rows: list[dict]
    caption: str = ""
    means: list[dict[str, str]] = field(default_factory=list)  # last rows, each {title: text}

    def titles(self):
        return [" ".join(column.title.split()) for column in self.columns]

    def cells(self):
        """All rows as text."""
        rows = [[column.cell(row) for column in self.columns] for row in self.rows]
        return rows + [
            [mean.get(column.title, "") for column in self.columns] for mean in self.means
        ]


def machine_line(machine):
    return (
        f"{machine['cpu']}, {machine['cores']} cores, {machine['threads']} threads, "
        f"{machine['dtype']}; qkv {machine['qkv']} ({machine['isa']}), "
        f"torch {machine['torch']} ({machine['torch_isa']})"
    )


def machine_lines(run):
    peak = run["peak"]
    read = f"memory read {peak['read_gbs']:.1f} GB/s"
    if "gflops" in peak:
        read = f"{peak['instruction']} peak {peak['gflops']:.0f} GFLOP/s, {read}"
    return [machine_line(run["machine"]), read]


def text(run, tables):
    """For a terminal."""
    parts = ["\n".join(machine_lines(run))]
    for table in tables:
        titles = [column.title for column in table.columns]
        parts += [table.caption, tabulated(table, titles, table.cells(), "simple")]
    said = [f"note: {note}" for note in notes(run)]
    parts.append("\n".join(said + [f"warning: {warning}" for warning in run["warnings"]]))
    return "\n\n".join(filter(None, parts))


def markdown(run, tables):
    """For a page."""
    parts = ["  \n".join(machine_lines(run))]
    for table in tables:
        bold = [column.is_bold for column in table.columns]
        rows = [
            [in_bold(x) if is_bold else x for x, is_bold in zip(row, bold, strict=True)]
            for row in table.cells()
        ]
        parts += [table.caption, tabulated(table, table.titles(), rows, "pipe")]
    parts += [f"Note: {note}" for note in notes(run)]
    parts += [f"Warning: {warning}" for warning in run["warnings"]]
    return "\n\n".join(filter(None, parts))


def in_bold(x):
    head, _, rest = x.partition(" ")
    return f"**{head}** {rest}".rstrip() if head else ""


def tabulated(table, titles, rows, style):
    from tabulate import tabulate  # which only the tables need

    align = ["left" if column.is_text else "right" for column in table.columns]
    found = tabulate(rows, titles, style, colalign=align, disable_numparse=True)
    return "\n".join(line.rstrip() for line in found.splitlines())
