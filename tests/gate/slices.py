"""What is drawn anew for each commit, by its hash: random calls, one of twelve slices of the long
layer, and one in sixty of the models of docs/models.md. tests/fuzz makes the same calls each time,
so that it does not rot: of ten thousand new ones, one may still be one that nobody has decided on.
And the kernels of AVX2 under sanitizers, which are no newcomer's business and take him a minute.

A slice takes about five minutes on two cores, its build included. Python's tests that it has no
time for are said to be skipped, and are others with another seed. No slice has the sanitized torch
side, which takes longer to build than that, and the wheel from the source distribution.
"""

import suites
from tasks import Task

import qkv

MINUTES = 2.0  # of random calls, on all cores
CALLS = 250  # of tests/fuzz on each instruction set: a quarter of a minute of one core
SECONDS = 240  # of Python's tests in a slice
PYTHON = 5  # slices of Python's tests
# Kernels under sanitizers: two minutes of compiling each.
SANITIZED = ("isa/generic", "isa/avx2", "isa/avx512", "isa/avx512bf16", "emulated/amx",
             "emulated/avx512bf16")  # fmt: skip
MODELS = 60  # parts of the models that were tried, each of which takes one core less than a minute


def of_python(part: int, seed: int) -> str:
    drawn = f"--long --hypothesis-seed={seed} --part={part}/{PYTHON} --most-seconds={SECONDS}"
    return f"python -m pytest -rfEs tests/python {drawn} {suites.WORKERS}"


def of_csrc(part: int) -> str:
    """Half of the kernels' tests uncut, with the twins of all instruction sets."""
    build = suites.build(suites.ALL_TWINS, "qkv_csrc_tests")
    return f"{build}\nQKV_PART={part}/2 {suites.CSRC}"


def of_sanitized(draw: int) -> str:
    """Two of the instruction sets, others with another draw."""
    drawn = [SANITIZED[(draw + n) % len(SANITIZED)] for n in range(2)]
    tests = ":".join(f"*/{kernels.removeprefix('isa/').replace('/', '_')}" for kernels in drawn)
    target = "qkv_csrc_tests_sanitized"
    build = suites.build(suites.ALL_TWINS, target, ";".join(drawn), without="")
    return f"{build}\n{suites.SANITIZED} '--gtest_filter={tests}-{suites.NOT_OF_TWINS}'"


def slices(seed: int) -> list[tuple[str, str]]:
    """(what it is, its command) of each. `.ci/packages` installs what a slice needs, as root."""
    twins = " ".join(suites.ALL_TWINS)
    return [
        *((f"python, part {n + 1} of {PYTHON}", of_python(n, seed)) for n in range(PYTHON)),
        *((f"csrc uncut, part {n + 1} of 2", of_csrc(n)) for n in range(2)),
        ("csrc, two instruction sets under sanitizers", of_sanitized(seed // 12)),
        (
            "csrc on 64-bit Arm",
            ".ci/packages aarch64-linux-gnu-g++ qemu-aarch64\ntests/emulation/aarch64.sh quick",
        ),
        (
            "csrc by Clang",
            ".ci/packages clang++ libomp\n"
            f"QKV_QUICK_TESTS=1 tests/clang.sh '--gtest_filter=-{suites.NOT_OF_TWINS}'",
        ),
        ("races, by ThreadSanitizer", ".ci/packages clang++ libomp tsan\ntests/tsan.sh"),
        (
            "python on emulated twins",
            f"{suites.build(suites.ALL_TWINS, 'qkv_with_emulated')}\n"
            f"tests/emulation/twins.sh {suites.BUILD} '{twins}' tests/python --long -rfEs "
            f"--hypothesis-seed={seed} --most-seconds={SECONDS // 2} {suites.WORKERS}",
        ),
    ]


def minutes_of(all_cores: float) -> float:
    """Of each instruction set, so that all of them take as long as that."""
    return all_cores * suites.CORES / len(qkv.supported_isas())


def commit(commit_hash: str) -> list[Task]:
    number = int(commit_hash[:8], 16)
    seed, found = number % 2**31, slices(number % 2**31)
    which = number % len(found)
    what, command = found[which]
    print(f"commit {commit_hash[:12]}: seed {seed}, slice {which + 1} of {len(found)}: {what}")
    print(f"once more: python tests/gate commit {commit_hash[:12]}")
    # Of the 11,000 calls that this is on a Zen 5, one may be right and yet beyond the usual bound,
    # which was measured on 100,000; a defect is further off.
    drawn = [
        f"--wide --minutes {minutes_of(part * MINUTES):.2f} --seed {seed}" for part in (0.85, 0.15)
    ]
    truth = suites.truth(*drawn)
    models = (
        f"python -m benchmarks.models_tried --part {number % MODELS}/{MODELS} --seconds 45 "
        "--timeout 30 --against benchmarks/results/models-5.24.0.json"
    )
    return [
        Task("truth-anew", truth),
        suites.csrc_sanitized(),
        # Which may build in the tree of the sanitized kernels.
        Task("slice", command, ("truth-anew", "csrc-sanitized")),
        Task("fuzz", f"python tests/fuzz --seed 0 --calls {CALLS}", cores=1),
        Task("models-anew", models, ("truth-anew",), cores=1),
    ]
