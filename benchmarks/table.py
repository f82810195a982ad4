"""Tables of a run as text. A row is {title: text}, a table (caption, rows)."""

from qkv.bench import machine

from .report import is_noisy

RATIO = "× torch (IQR)"
TEXT = {"", "shape", "B×Hq/Hkv×L×S×D", "dtype", "pass"}  # titles of what is flush left


def text(run, tables, notes=(), left=()):
    """For a terminal. left: more titles of what is flush left."""
    parts = ["\n".join(machine.lines(run["machine"], run["peak"]))]
    for caption, rows in tables:
        parts += [caption, tabulated(rows, left=left)]
    said = [f"note: {note}" for note in notes]
    parts.append("\n".join(said + [f"warning: {warning}" for warning in run["warnings"]]))
    return "\n\n".join(filter(None, parts))


def tabulated(rows, style="simple", left=()):
    """left: more titles of what is flush left."""
    from tabulate import tabulate  # which only the tables need

    titles = dict.fromkeys(title for row in rows for title in row)
    align = ["left" if title in TEXT.union(left) else "right" for title in titles]
    found = tabulate(rows, "keys", style, colalign=align, disable_numparse=True)
    return "\n".join(line.rstrip() for line in found.splitlines())


def of_shape(result):
    sizes = result["shape"].replace("x", "×")
    if sizes.endswith("c"):
        sizes = f"{sizes[:-1]} causal"
    return {"shape": result["name"], "B×Hq/Hkv×L×S×D": sizes}


def times(found):
    """What one direction of a result says of both times."""
    return {
        "ms": milliseconds(found, "qkv"),
        "torch's ms": milliseconds(found, "torch"),
        RATIO: ratio(found, with_spread=True),
    }


def speed(found, peak):
    gflops = found["qkv"]["gflops"]
    return {"GFLOP/s": f"{gflops:.0f}", "of peak": f"{gflops / peak['gflops']:.0%}"}


def cache_reads(result, direction):
    """How fast keys and values are read, where the direction is a forward pass."""
    ours, theirs = (result[direction].get(name, {}).get("gbs") for name in ("qkv", "torch"))
    return {
        "K and V read,\nGB/s": f"{ours:.1f}" if ours else "",
        "of memory's": f"{ours / result['read_gbs']:.0%}" if ours else "",
        "torch's\nGB/s": f"{theirs:.1f}" if theirs else "",
        "memory,\nGB/s": f"{result['read_gbs']:.1f}" if ours else "",
    }


def errors(result, direction):
    """Of the tensor that comes closest to its limit: its largest error from float64, and
    torch's."""
    of = {"forward": "output", "backward": "grad_"}[direction]
    found = [error for tensor, error in result["check"].items() if tensor.startswith(of)]
    worst = max(found, key=lambda e: e["error"] / e["limit"] if e["limit"] else 0)
    return {"error": f"{worst['error']:.1e}", "torch's error": f"{worst['torch_error']:.1e}"}


def memory(found):
    """What a call takes beyond its inputs at its peak."""

    def mebibytes(name):
        taken = found.get(name, {}).get("extra_bytes")
        return "" if taken is None else f"{taken / 2**20:.0f}"

    return {"extra MiB": mebibytes("qkv"), "torch's MiB": mebibytes("torch")}


def has_memory(run):
    return any("extra_bytes" in r[d]["qkv"] for r in run["results"] for d in run["directions"])


def ratio(found, key="ratio", with_spread=False):
    if key not in found:
        return ""
    ratio = found[key]
    spread = f" ({ratio['iqr']:.2f})" if with_spread else ""
    return f"{ratio['median']:.2f}{'~' if is_noisy(ratio) else ''}{spread}"


def milliseconds(found, name):
    """How long a call takes."""
    if name not in found:
        return ""
    ms = 1e3 * found[name]["seconds"]["median"]
    return f"{ms:.3g}" if ms < 1000 else f"{ms:.0f}"
