"""The text of a score program, and its lines as tuples, such as ("load", 0, 2)."""

Line = tuple[str | int, ...]

# Their arguments are no registers.
_LEAVES = frozenset("score batch head query key float int bool".split())


def operands(line: Line) -> tuple[int, ...]:
    """The registers that an instruction reads."""
    if line[0] in _LEAVES:
        return ()
    return line[2:] if line[0] == "load" else line[1:]  # type: ignore[return-value]


def needed(tables: list[Line], lines: list[Line], result: int) -> tuple[list[Line], list[Line]]:
    """Those of these tables and instructions that `result` needs, numbered anew: it is the last."""
    found = {result}
    for n in range(result, -1, -1):
        if n in found:
            found.update(operands(lines[n]))
    kept = sorted(found)
    number = {n: new for new, n in enumerate(kept)}
    used = sorted({lines[n][1] for n in kept if lines[n][0] == "load"})
    table = {n: new for new, n in enumerate(used)}
    left: list[Line] = []
    for n in kept:
        head = lines[n][: len(lines[n]) - len(operands(lines[n]))]
        if head[0] == "load":
            head = ("load", table[head[1]])
        left.append((*head, *(number[x] for x in operands(lines[n]))))
    return [tables[n] for n in used], left  # type: ignore[index]


def written(tables: list[Line], lines: list[Line]) -> str:
    return "\n".join(" ".join(map(str, line)) for line in (*tables, *lines))
