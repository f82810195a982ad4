"""What was measured, how far the model is from it, and what it says of many hosts: as text."""

from .cost import Split, efficiency, splits
from .figures import Hosts, Layer

KI = 1024
TOKENS = tuple(n * KI for n in (128, 256, 512, KI, 4 * KI, 16 * KI))  # 128 Ki to 16 Mi
HOSTS = tuple(2**n for n in range(1, 11))  # 2 to 1,024
METHODS = {
    "ring": "ring",
    "plain": "ring, no zigzag",
    "heads": "heads",
    "both": "both: heads × ring",
}


def grid(layer: Layer, hosts: Hosts) -> list[dict]:
    """{"tokens", "hosts", "ring", "plain", "heads", "both", "split"}: efficiencies, None where
    heads do not divide, or no split is of two; "split" is that of "both"."""
    return [cell(layer, tokens, ranks, hosts) for tokens in TOKENS for ranks in HOSTS]


def cell(layer: Layer, tokens: int, ranks: int, hosts: Hosts) -> dict:
    def of(split: Split, is_zigzag: bool = True) -> float:
        return efficiency(layer, tokens, split, hosts, is_zigzag)

    possible = [*splits(ranks, layer)]
    mixed = {split: of(split) for split in possible if split.heads > 1 and split.ring > 1}
    best = max(mixed, key=lambda split: mixed[split], default=None)
    alone = Split(ranks, 1)
    return {
        "tokens": tokens,
        "hosts": ranks,
        "ring": of(Split(1, ranks)),
        "plain": of(Split(1, ranks), is_zigzag=False),
        "heads": of(alone) if alone in possible else None,
        "both": mixed[best] if best else None,
        "split": str(best) if best else None,
    }


def size(tokens: int) -> str:
    return f"{tokens // KI**2} Mi" if tokens >= KI**2 else f"{tokens // KI} Ki"


def tables(run: dict, style: str) -> str:
    """All of it; style is one of tabulate's."""
    from tabulate import tabulate

    def table(titles: list[str], rows: list[list]) -> str:
        align = ["left"] + ["right"] * (len(titles) - 1)
        return tabulate(rows, titles, style, colalign=align, disable_numparse=True)

    parts = [run["machine"], table(*measured(run)), found(run), table(*checked(run)), stated(run)]
    for name, cells in run["efficiency"].items():
        parts += [name, table(*predicted(cells))]
    return "\n\n".join(parts)


def measured(run: dict) -> tuple[list[str], list[list]]:
    titles = ["step", "tokens a rank", "MB", "compute, ms", "transport, ms", "both, ms"]
    rows = [
        [
            sample["pass"],
            str(sample["rows"]),
            f"{sample['bytes'] / 1e6:.2f}",
            *(f"{1e3 * sample[what]:.2f}" for what in ("compute", "transport", "both")),
        ]
        for sample in run["samples"]
    ]
    return titles, rows


def found(run: dict) -> str:
    core, lines = run["core"], []
    for name in ("forward", "backward"):
        block = core[name]
        lines.append(
            f"{name}: {1e-9 / block['flop']:.1f} GFLOP/s a core, {1e6 * block['fixed']:.0f} µs a "
            f"step, {1e9 * block['element']:.2f} ns for each element of the queries; a causal "
            f"block takes {block['causal']:.2f} times as long as another of as many pairs"
        )
    link = core["transport"]
    lines.append(
        f"transport over loopback: {link['bytes_per_s'] / 1e9:.2f} GB/s each way, "
        f"{1e6 * link['latency']:.0f} µs a step; it takes {1e9 * core['transport_cpu']:.2f} ns of "
        "a core for each byte"
    )
    return "\n".join(lines)


def checked(run: dict) -> tuple[list[str], list[list]]:
    titles = ["forward + backward", "ranks", "tokens", "measured, ms", "predicted, ms", "error"]
    rows = [
        [
            check["method"] if check["ranks"] > 1 else "alone",
            str(check["ranks"]),
            str(check["tokens"]),
            f"{1e3 * check['seconds']:.1f}",
            f"{1e3 * check['predicted']:.1f}",
            f"{check['predicted'] / check['seconds'] - 1:+.1%}",
        ]
        for check in run["checks"]
    ]
    return titles, rows


def stated(run: dict) -> str:
    layer, hosts = run["layer"], run["hosts"]
    return (
        f"Predicted: {layer['heads']} heads, {layer['kv_heads']} of keys and values, of "
        f"{layer['head_dim']} features of {layer['itemsize']} bytes; hosts of {hosts['cores']} "
        f"such cores at {hosts['scaling']:.0%} of their speed"
    )


def predicted(cells: list[dict]) -> tuple[list[str], list[list]]:
    """One row for each method and length, one column for each number of hosts."""
    ranks = sorted({cell["hosts"] for cell in cells})
    by_place = {(cell["tokens"], cell["hosts"]): cell for cell in cells}
    titles = ["method", "tokens", *(str(n) for n in ranks)]
    rows = []
    for method, title in METHODS.items():
        for tokens in sorted({cell["tokens"] for cell in cells}):
            shown = [by_place[tokens, n] for n in ranks]
            rows.append([title, size(tokens), *(percent(cell, method) for cell in shown)])
    return titles, rows


def percent(cell: dict, method: str) -> str:
    value = cell[method]
    if value is None:
        return ""
    text = f"{value:.1%}" if value > 0.995 else f"{value:.0%}"
    return f"{text} {cell['split']}" if method == "both" else text
