"""Counts the instructions and last-level cache misses of some twenty small calls, calls.cpp, under
valgrind, and holds them against table.tsv: a gate for speed that noise cannot touch.

    python tests/instructions                 fails if a call takes 2 % more
    python tests/instructions --only latency  the calls whose name has that word
    python tests/instructions --write         puts what it counts into the table

Everything runs on one thread, on simulated caches, with an allocator of its own (memory.cpp) and an
environment that is always the same; so any machine counts the same, and the next run, too. Another
compiler, torch or valgrind counts something else: there it skips. Valgrind knows no AVX-512, so
only AVX2 and generic code are counted.
"""

import argparse
import collections
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

from tabulate import tabulate

ROOT = Path(__file__).resolve().parents[2]
TABLE = Path(__file__).with_name("table.tsv")
TORCH = ".".join(version("torch").split(".")[:2])
ISAS = ("avx2", "generic")
GROWTH = 0.02
# Where functions and memory begin moves misses, by as much as 7 of 1200 and 120 of 13,500.
SLACK = (0, 32)
LISTED = 0.02  # functions with less of a call's instructions and misses are not in the table
# A small first cache of instructions: what a call leaves in it spares the next one its misses.
CALLGRIND = (
    "--tool=callgrind --instr-atstart=no --dump-line=no --compress-strings=no --compress-pos=no "
    "--combine-dumps=yes --cache-sim=yes --I1=1024,1,64 --D1=32768,8,64 --LL=1048576,16,64"
).split()
TOTAL = "all"
EVENTS = ("instructions", "misses")  # of the last level
HEADER = "\t".join(("instruction set", "call", "function", *EVENTS))


def short(function, binary):
    """A function without its types; other libraries than qkv's count as one function each."""
    if not binary.startswith(("libqkv", "qkv_")):
        return re.sub(r"(-[0-9a-f]{8}|-linux.*)?\.so.*", ".so", binary)
    text = function.replace("(anonymous namespace)", "").replace("operator()", "call")
    while text != (text := re.sub(r"<[^<>]*>|\([^()]*\)|\{[^{}]*\}", "", text)):
        pass
    words = re.sub(r" const\b| \[.*?\]|'\d+", "", text).split(" ")
    return re.sub("(::)+", "::", words[-1]) or function


def parts(text):
    """{call: {function: (instructions, misses)}} of what callgrind wrote."""
    events = re.search(r"^events: (.*)$", text, re.M)[1].split()
    wanted = [events.index(name) for name in ("ILmr", "DLmr", "DLmw")]
    found = {}
    for part in re.split(r"^part: ", text, flags=re.M)[1:]:
        call = re.search(r"^desc: Trigger: Client Request: (.*)$", part, re.M)
        instructions, misses = collections.Counter(), collections.Counter()
        binary = function = key = ""
        for line in part.splitlines():
            calls, (key, _, value) = key == "calls", line.partition("=")
            if key == "ob":
                binary = Path(value).name
            elif key == "fn":
                function = short(value, binary)
            elif re.match(r"\d+ \d", line) and not calls:  # after calls= stands the callee's cost
                costs = [int(cost) for cost in line.split()[1:]] + [0] * len(events)
                instructions[function] += costs[0]
                misses[function] += sum(costs[n] for n in wanted)
        if call:
            functions = {name: (instructions[name], misses[name]) for name in instructions}
            found[call[1]] = {TOTAL: (instructions.total(), misses.total()), **functions}
    return found


def count(build, isas, words):
    """{(isa, call): {function: (instructions, misses)}}; the instruction sets side by side."""
    with tempfile.TemporaryDirectory() as folder:
        running = {}
        for isa in isas:
            settings = {"QKV_ISA": isa, "OMP_NUM_THREADS": "1"}
            out = f"--callgrind-out-file={folder}/{isa}"
            command = [shutil.which("valgrind"), *CALLGRIND, out, "./qkv_instructions", *words]
            running[isa] = subprocess.Popen(
                command, cwd=build, env=settings, text=True,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            )  # fmt: skip
        said = {isa: process.communicate()[0] for isa, process in running.items()}
        for isa, process in running.items():
            if process.returncode:
                sys.exit(f"{isa}: {said[isa][-3000:]}")
        return {
            (isa, call): functions
            for isa in isas
            for call, functions in parts(Path(folder, isa).read_text()).items()
        }


def read():
    """(what the table was counted with, its {(isa, call): {function: (instructions, misses)}})."""
    if not TABLE.exists():
        return "", {}
    counted_with, _, *lines = TABLE.read_text().splitlines()
    table = collections.defaultdict(dict)
    for isa, call, function, *counts in (line.split("\t") for line in lines):
        table[isa, call][function] = tuple(map(int, counts))
    return counted_with, table


def large(functions):
    """Those that the table lists, the largest first."""
    instructions, misses = (LISTED * count for count in functions[TOTAL])
    kept = [f for f, (i, m) in functions.items() if i >= instructions or m >= misses]
    return sorted(kept, key=lambda f: (f != TOTAL, *(-count for count in functions[f])))


def write(counted_with, table):
    lines = [
        "\t".join(map(str, (*key, function, *table[key][function])))
        for key in sorted(table, key=lambda key: key[0])
        for function in large(table[key])
    ]
    TABLE.write_text("\n".join([counted_with, HEADER, *lines]) + "\n")


def grown(then, now, event):
    """The functions that grew most: (function, count then, count now)."""
    least = int(LISTED * then[TOTAL][event])
    rows = []
    for function in now.keys() - {TOTAL}:
        count = now[function][event]
        before = then[function][event] if function in then else min(least, count)
        rows.append((count - before, function, before if function in then else "few", count))
    return [row[1:] for row in sorted(rows, key=lambda row: -row[0])[:3] if row[0] > 0]


def judged(then, now):
    """(what became of the call, "" if it is as it was; the events of which it has too many)."""
    if not then or not now:
        return ("not in the table" if now else "gone"), []
    pairs = [(then[TOTAL][event], now[TOTAL][event]) for event in range(len(EVENTS))]
    more = [n for n, (old, new) in enumerate(pairs) if new > old * (1 + GROWTH) + SLACK[n]]
    less = any(new < old * (1 - GROWTH) - SLACK[n] for n, (old, new) in enumerate(pairs))
    return f"more {' and '.join(EVENTS[n] for n in more)}" if more else "less" if less else "", more


def compare(isa, table, counted):
    """Prints what changed. (The closing line, whether all calls held, whether the table did)."""
    nothing, rows, failed = {TOTAL: ("", "")}, [], 0
    calls = [key for key in {**table, **counted} if key[0] == isa]
    for key in calls:
        then, now = table.get(key, {}), counted.get(key, {})
        verdict, more = judged(then, now)
        failed += verdict not in ("", "less")
        if verdict:
            pairs = zip((then or nothing)[TOTAL], (now or nothing)[TOTAL], strict=True)
            rows.append((key[1], *(count for pair in pairs for count in pair), verdict))
        for event in more:
            print(f"{isa}, {key[1]}: the functions with more {EVENTS[event]}")
            print(tabulate(grown(then, now, event), ("function", "then", "now")), end="\n\n")
    if rows:
        print(tabulate(rows, (isa, "instructions", "now", "misses", "now", "")), end="\n\n")
    closing = f"{isa}: {len(calls) - failed} held, {failed} failed of {len(calls)} calls"
    return closing, not failed, not rows


def counted_here(build):
    """What the counts depend on, as the table's first line says it."""
    cache = (build / "CMakeCache.txt").read_text()
    compiler = re.search(r"^CMAKE_CXX_COMPILER:\w+=(.*)$", cache, re.M)[1]
    gcc = subprocess.check_output([compiler, "-dumpversion"], text=True).split(".")[0].strip()
    valgrind = subprocess.check_output(["valgrind", "--version"], text=True)
    valgrind = re.search(r"\d+\.\d+", valgrind)[0]
    # Valgrind takes after the host in this, and torch and glibc choose their functions by it.
    avx2 = "AVX2" if " avx2 " in Path("/proc/cpuinfo").read_text() else "no AVX2"
    machine = f"{platform.machine()} with {avx2}"
    return f"g++ {gcc}, torch {TORCH}, valgrind {valgrind}, {machine}"


def skip(reason):
    print(f"SKIPPED [1] tests/instructions: {reason}")


def built(build):
    make = ["cmake", "--build", build, "--target", "qkv_instructions"]
    done = subprocess.run(make, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    if done.returncode:
        sys.exit(done.stdout[-3000:])


def main():
    parser = argparse.ArgumentParser(
        prog="python tests/instructions", description=__doc__.split("\n\n")[0]
    )
    parser.add_argument("--isa", nargs="+", choices=ISAS, default=[*ISAS])
    parser.add_argument("--only", nargs="+", default=[], metavar="WORD")
    parser.add_argument("--write", action="store_true", help="the table anew")
    parser.add_argument("--build", type=Path, default=ROOT / "build" / f"torch-{TORCH}")
    options = parser.parse_args()
    if not shutil.which("valgrind"):
        return skip("there is no valgrind")
    here, (of, table) = counted_here(options.build), read()
    if here != of and not options.write:
        return skip(f"the table is of {of}, here are {here}")
    built(options.build)
    counted = count(options.build, options.isa, options.only)
    if not counted:
        sys.exit("--only: there is no such call")
    asked = {
        key: functions
        for key, functions in table.items()
        if key[0] in options.isa and (not options.only or any(w in key[1] for w in options.only))
    }
    results = [compare(isa, asked, counted) for isa in options.isa]
    if options.write:
        old = {key: table[key] for key in table if key in counted or key not in asked}
        write(here, (old if here == of else {}) | counted)
    elif not all(same for _, _, same in results):
        print("If that is meant: python tests/instructions --write")
    print(*(closing for closing, _, _ in results), sep="\n")
    return not options.write and not all(good for _, good, _ in results)


if __name__ == "__main__":
    sys.exit(main())
