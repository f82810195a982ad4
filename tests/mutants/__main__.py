"""Changes a sign, a bound or a stride of qkv, or puts a defect back, and runs the tests: a mutant
that none of them notices shows what they do not test.

    python tests/mutants                      the defects that were in qkv: defects.toml
    python tests/mutants --drawn 50 --seed 7  changes at random places of csrc and torch_ext
    python tests/mutants --only sinks         those whose name has that word

All of it happens in a copy of the repository, build/mutants, built with generic and AVX2 kernels
alone: with --pairs also with the emulated AMX, without which nothing multiplies pairs of bf16. The
suites run one after the other, the shortest first, until one fails.
"""

import argparse
import filecmp
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import tomllib
from draw import Mutant, drawn
from tabulate import tabulate

ROOT = Path(__file__).resolve().parents[2]
WORK = ROOT / "build" / "mutants"
TREE, BUILD = WORK / "tree", WORK / "build"
CMAKE = ("-DQKV_TORCH=ON", "-DQKV_TESTS=ON", "-DQKV_AVX512=OFF")
SUITES = {
    "truth": "python tests/truth --calls 300 --seed 0",
    "csrc": f"tests/in_shards.sh {BUILD}/qkv_csrc_tests --gtest_brief=1 --gtest_fail_fast",
    "torch_ext": f"{BUILD}/qkv_torch_tests --gtest_brief=1",
    "python": "python -m pytest tests/python --ignore-glob=*/test_distributed_* "
    "-x -q --numprocesses=auto --maxprocesses=8",
    "distributed": "python -m pytest -x -q tests/python/test_distributed_*.py",
}


def run(command, limit=None):
    """(whether it succeeded, its last lines)."""
    # Like with like: bounds that are relative to torch's error are of torch on AVX2, too. What
    # Inductor compiles then is for AVX2, and its cache does not tell that from AVX-512's.
    settings = dict(
        os.environ,
        QKV_QUICK_TESTS="1",
        ATEN_CPU_CAPABILITY="avx2",
        TORCHINDUCTOR_CACHE_DIR=str(WORK / "inductor"),
        PYTHONPATH=str(TREE / "torch_ext"),
    )
    try:
        done = subprocess.run(
            ["bash", "-c", command], cwd=TREE, env=settings, timeout=limit, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return False, f"took more than {limit} s"
    return done.returncode == 0, done.stdout


def build():
    install = f"cmake --install {BUILD} --prefix torch_ext/qkv"
    return run(f"cmake --build {BUILD} && {install}")


def prepare(emulated):
    """Copies what is tracked, as it is now, where it differs, and builds it."""
    listed = subprocess.check_output(["git", "-C", ROOT, "ls-files"], text=True)
    for old in TREE.rglob("*.cpp"):  # CMake would compile what is gone in the repository
        if not (ROOT / old.relative_to(TREE)).exists():
            old.unlink()
    for name in listed.splitlines():
        source, copy = ROOT / name, TREE / name
        if source.is_file() and not (copy.exists() and filecmp.cmp(source, copy, shallow=False)):
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, copy)
    torch = (
        '-DCMAKE_PREFIX_PATH="$(python -c "import torch; print(torch.utils.cmake_prefix_path)")"'
    )
    options = " ".join([*CMAKE, f"-DQKV_EMULATED_ISAS={emulated}", torch])
    configured, text = run(f"cmake -S . -B {BUILD} -G Ninja {options}")
    built, text = build() if configured else (False, text)
    if not built:
        sys.exit(text[-3000:])


def first_failure(text):
    """What a suite says of the first test that failed."""
    marks = ("[  FAILED  ]", "FAILED ", "ERROR ", " failed, after", "Fatal", "took more")
    lines = [x.strip() for x in text.splitlines() if x.strip()] or ["nothing"]
    return next((x for x in lines if any(m in x for m in marks)), lines[-1])[:90]


def limits(suites):
    """{suite: seconds}, by what each takes without a mutant: one that takes longer has noticed."""
    found = {}
    for suite in suites:
        began = time.monotonic()
        passed, text = run(SUITES[suite])
        if not passed:
            sys.exit(f"{suite} fails without any mutant: {first_failure(text)}")
        found[suite] = 60 + 2 * (time.monotonic() - began)
    return found


def judged(mutant, limits):
    """(the suite that noticed, what it said); "lived" if none did."""
    path = TREE / mutant.file
    before = path.read_text()
    path.write_text(mutant.applied(before))
    try:
        if mutant.compiles:
            built, text = build()
            if not built:
                return "compiler", first_failure(text)
        named = {"its own tests": f"python -m pytest -x -q {mutant.tests}"} if mutant.tests else {}
        for suite, command in (named | {s: SUITES[s] for s in limits}).items():
            passed, text = run(command, limits.get(suite, max(limits.values())))
            if not passed:
                return suite, first_failure(text)
        return "LIVED", ""
    finally:
        path.write_text(before)


def defects():
    listed = tomllib.loads((Path(__file__).parent / "defects.toml").read_text())["mutant"]
    return [Mutant(**one) for one in listed]


def main():
    text = __doc__.split("\n\n")[0]
    parser = argparse.ArgumentParser(prog="python tests/mutants", description=text)
    parser.add_argument("--drawn", type=int, default=0, metavar="N", help="random ones instead")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="+", default=[""], metavar="WORD")
    parser.add_argument("--suites", nargs="+", choices=SUITES, default=[*SUITES])
    parser.add_argument("--pairs", action="store_true", help="build the emulated AMX, too")
    options = parser.parse_args()
    mutants = drawn(ROOT, options.drawn, options.seed) if options.drawn else defects()
    prepare("amx" if options.pairs else "")
    most = limits(options.suites)
    rows = []
    for mutant in (m for m in mutants if any(word in m.name for word in options.only)):
        began = time.monotonic()
        rows.append((mutant.name, *judged(mutant, most), time.monotonic() - began))
        print("{}: {} {} ({:.0f} s)".format(*rows[-1]), flush=True)
    lived = sum(row[1] == "LIVED" for row in rows)
    print(tabulate(rows, ("mutant", "noticed by", "test", "seconds"), floatfmt=".0f"))
    print(f"{lived} of {len(rows)} lived")
    return lived > 0


if __name__ == "__main__":
    sys.exit(main())
