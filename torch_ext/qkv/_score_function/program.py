"""The text of a score program, and its lines as tuples, such as ("load", 0, 2)."""

Line = tuple[str | int, ...]

# Their arguments are no registers.
_LEAVES = frozenset("score batch head query key float int bool".split())


def operands(line: Line) -> tuple[int, ...]:
    """The registers that an instruction reads."""
    if line[0] in _LEAVES:
        return ()
    return line[2:] if line[0] == "load" else line[1:]  # type: ignore[return-value]


def written(tables: list[Line], lines: list[Line]) -> str:
    return "\n".join(" ".join(map(str, line)) for line in (*tables, *lines))
