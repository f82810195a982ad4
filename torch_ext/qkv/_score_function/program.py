"""The text of a score program, and its lines as tuples, such as ("load", 0, 2)."""

Line = tuple[str | int, ...]

# Their arguments are no registers.
_LEAVES = frozenset("score batch head query key float int bool".split())


def operands(line: Line) -> tuple[int, ...]:
    """The registers that an instruction reads."""
    if line[0] in _LEAVES:
        return ()
    return line[2:] if line[0] == "load" else line[1:]  # type: ignore[return-value]


def written(tables: list[Line], lines: list[Line], result: int) -> str:
    """The text of what `result` needs, of these tables and instructions."""
    needed = {result}
    for n in range(result, -1, -1):
        if n in needed:
            needed.update(operands(lines[n]))
    kept = sorted(needed)
    number = {n: new for new, n in enumerate(kept)}
    used = sorted({lines[n][1] for n in kept if lines[n][0] == "load"})
    table = {n: new for new, n in enumerate(used)}
    text = [tables[n] for n in used]  # type: ignore[index]
    for n in kept:
        head = lines[n][: len(lines[n]) - len(operands(lines[n]))]
        if head[0] == "load":
            head = ("load", table[head[1]])
        text.append((*head, *(number[x] for x in operands(lines[n]))))
    return "\n".join(" ".join(map(str, line)) for line in text)


def parsed(text: str) -> tuple[list[Line], list[Line]]:
    """Tables and instructions."""
    tables: list[Line] = []
    lines: list[Line] = []
    for row in text.splitlines():
        name, *rest = row.split()
        line = (name, *(rest if name in ("float", "int", "bool") else map(int, rest)))
        (tables if name.startswith("@") else lines).append(line)
    return tables, lines
