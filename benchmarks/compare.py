"""A run beside an earlier one of the same shapes: what each shape took then, and takes now."""

import json

from qkv.bench import machine

from .table import milliseconds, of_shape, ratio

FIELDS = {"suite", "machine", "peak", "directions", "results", "geometric_mean", "warnings"}
SAME = ("cpu", "threads", "isa")  # where one of them differs, only ratios compare


def read(path, suites, option="--compare"):
    """A run of one of the suites, as --json wrote it. option: which names the file, for errors.
    Raises ValueError."""

    def refused(why):
        return ValueError(f"{option}: {path} {why}")

    try:
        run = json.loads(path.read_text())
    except OSError as error:
        raise refused(f"cannot be read: {error.strerror}") from None
    except ValueError:
        raise refused("is no JSON, expected a file that --json has written") from None
    if not isinstance(run, dict) or not FIELDS <= set(run):
        raise refused("is no run, expected a file that --json has written") from None
    if run["suite"] not in suites:
        raise refused(f"is a run of '{run['suite']}', expected one of {', '.join(suites)}")
    return run


def earlier(path, suite, planned):
    """The run of --compare, or None without a path; planned: the key() of each result beside it.
    Raises ValueError, as where it has none of them."""
    if not path:
        return None
    then = read(path, [suite.name])
    found = set(map(key, then["results"]))
    if planned.isdisjoint(found):
        wanted, had = ("; ".join(sorted(map(" ".join, keys))) for keys in (planned, found))
        raise ValueError(f"--compare: {path} has none of: {wanted}. It has: {had}")
    return then


def key(result):
    return result["option"], result["shape"], result["dtype"]


def table(now, then):
    """(caption, rows): milliseconds then and now, and by how much they grew; and the ratio to
    torch, which holds on other machines too."""
    before = {key(result): result for result in then["results"]}
    rows = [
        row(result, direction, before[key(result)][direction])
        for result in now["results"]
        if key(result) in before
        for direction in now["directions"]
    ]
    return caption(now, then), rows


def row(result, direction, then):
    now = result[direction]
    found = of_shape(result) | {"dtype": result["dtype"], "pass": direction.replace("_", " ")}
    for name, whose in (("qkv", ""), ("torch", "torch's ")):
        found |= {
            f"{whose}ms then": milliseconds(then, name),
            f"{whose}ms now": milliseconds(now, name),
            f"{whose}now / then": growth(now, then, name),
        }
    return found | {"× torch then": ratio(then), "× torch now": ratio(now)}


def growth(now, then, name):
    if name not in now or name not in then:
        return ""
    return f"{now[name]['seconds']['median'] / then[name]['seconds']['median']:.2f}"


def caption(now, then):
    """What the earlier run was on, and what therefore compares."""
    lines = ["Then: " + machine.line(then["machine"])]
    other = [name for name in SAME if now["machine"][name] != then["machine"][name]]
    if other:
        lines.append(f"Then and now differ in {', '.join(other)}: only × torch compares.")
    return "\n".join(lines)
