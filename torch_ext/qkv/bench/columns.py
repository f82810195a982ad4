"""The columns that tables are made of."""

from .entry import PLAIN_PASS
from .report import errors_of, is_noisy, kept
from .table import Column

ROW = "row"  # the direction of a row that has one, see by_direction()
RATIO = "× torch (IQR)"
LABELS = {
    "both": "forward + backward",
    "double_backward": "second backward",
    "backward_twice": "first + second backward",
    ROW: "",
}


def label(direction: str) -> str:
    return LABELS.get(direction, direction)


def titled(direction, title):
    """The title of a column that is about one direction; of a row's direction, the title alone."""
    return f"{label(direction)}\n{title}".lstrip()


def by_direction(run, results):
    """A row for each direction of each result: the result with "direction", and what was found in
    that direction as ROW."""
    return [
        result | {"direction": d, ROW: result[d], "promised": {ROW: result["promised"].get(d, {})}}
        for result in results
        for d in run["directions"]
    ]


def shape():
    return [
        Column("shape", lambda r: r["name"], is_text=True),
        Column("B×Hq/Hkv×L×S×D", sizes, is_text=True),
    ]


def dtype():
    return Column("dtype", lambda r: r["dtype"], is_text=True)


def direction(title):
    """That of a row."""
    return Column(title, lambda r: label(r["direction"]), is_text=True)


def sizes(result):
    text = result["shape"].replace("x", "×")
    return text[:-1] + " causal" if text.endswith("c") else text


def speed():
    """Of the direction of a row."""
    return [number(ROW, "qkv", "gflops", "GFLOP/s", ".0f"),
            number(ROW, "qkv", "share_of_peak", "of peak", ".0%")]  # fmt: skip


def cache_reads():
    """How fast keys and values are read; of those rows that are about a forward pass."""
    return [
        number(ROW, "qkv", "gbs", "K and V read,\nGB/s", ".1f"),
        number(ROW, "qkv", "share_of_bandwidth", "of memory's", ".0%"),
        number(ROW, "torch", "gbs", "torch's\nGB/s", ".1f"),
        Column("memory,\nGB/s", lambda r: f"{r['read_gbs']:.1f}" if "gbs" in r[ROW]["qkv"] else ""),
    ]


def errors():
    """Of the tensor that comes closest to its limit: its largest error from float64, and
    torch's."""

    def cell(which):
        def shown(row):
            found = errors_of(row["check"], row["direction"])
            worst = max(found, key=lambda e: e["error"] / e["limit"] if e["limit"] else 0)
            return f"{worst[which]:.1e}"

        return shown

    return [Column("error", cell("error")), Column("torch's error", cell("torch_error"))]


def memory():
    """What a call takes beyond its inputs at its peak."""

    def mebibytes(name):
        def cell(row):
            found = row[ROW].get(name, {}).get("extra_bytes")
            return "" if found is None else f"{found / 2**20:.0f}"

        return cell

    return [Column("extra MiB", mebibytes("qkv")), Column("torch's MiB", mebibytes("torch"))]


def has_memory(run):
    return any("extra_bytes" in r[d]["qkv"] for r in run["results"] for d in run["directions"])


def number(direction, name, key, title, form):
    def cell(row):
        found = row[direction].get(name, {}).get(key)
        return "" if found is None else format(found, form)

    return Column(title, cell)


def ratio(direction, key, title, with_spread=False, **options):
    return Column(titled(direction, title), ratio_cell(direction, key, with_spread), **options)


def ratio_cell(place, key, with_spread=False):
    """row -> text of what row[place][key] says of a ratio."""

    def cell(row):
        found = row[place].get(key)
        if not found:
            return ""
        spread = f" ({found['iqr']:.2f})" if with_spread else ""
        return f"{found['median']:.2f}{'~' if is_noisy(found) else ''}{spread}"

    return cell


def milliseconds(direction, name, title):
    return Column(titled(direction, title), milliseconds_cell(direction, name))


def milliseconds_cell(place, name):
    """row -> text of how long a call of row[place][name] takes."""

    def cell(row):
        found = row[place].get(name)
        if not found:
            return ""
        ms = 1e3 * found["seconds"]["median"]
        return f"{ms:.3g}" if ms < 1000 else f"{ms:.0f}"

    return cell


def promise(direction, bound, sign):
    def cell(row):
        holds = kept(row, direction, bound)
        if holds is None:
            return ""
        return f"{sign} {row['promised'][direction][bound]:g}{'' if holds else ' !'}"

    return Column(titled(direction, "promised"), cell)


def plain_pass():
    return Column("own: that of", lambda r: PLAIN_PASS.get(r["direction"], ""), is_text=True)
