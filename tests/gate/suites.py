"""The builds and suites of each layer: CONTRIBUTING.md, "Three layers"."""

import os
import shutil

import torch
from tasks import Task

import qkv

# The tree in which setup.py has already built the library, so that nothing is compiled twice.
BUILD = "build/torch-" + ".".join(torch.__version__.split(".")[:2])
CORES = os.cpu_count() or 1
JOBS = f"--parallel {os.environ['MAX_JOBS']}" if os.environ.get("MAX_JOBS") else ""
CSRC = f"tests/in_shards.sh {BUILD}/qkv_csrc_tests --gtest_brief=1"
# With sanitizers each step is ten times slower, so that the long layer has the shorter loops, too.
SANITIZED = f"QKV_QUICK_TESTS=1 tests/in_shards.sh {BUILD}/qkv_csrc_tests_sanitized --gtest_brief=1"
# Each test runs a little on many threads and much on one. -rfEs: what failed, and
# what is skipped and why.
WORKERS = "--numprocesses=auto --maxprocesses=8"
# A worker takes whole files, one after the other: what a file imports, compiles and sets up is then
# there once. The long layer's files are too long for that where there are many workers.
BY_FILE = f"{WORKERS} --dist=loadfile --no-loadscope-reorder"
DISTRIBUTED = "tests/python/test_distributed_*.py"
# What the quick layer runs on twins: to import and collect all files takes a minute of CPU time.
ARITHMETIC = "$(sed s,^,tests/python/, tests/python/arithmetic.txt)"

# The instruction sets of csrc/isa that multiply bf16. Few CPUs have both; of the one that is
# missing, the quick layer takes the emulated twin (tests/csrc/emulated).
TWINS = [isa for isa in ("avx512bf16", "amx") if isa not in qkv.supported_isas()]
ALL_TWINS = ("avx512bf16", "amx")
# Of emulated instruction sets, whose other dtypes are generic code's, the quick layer leaves out
# what is not about products; the slices of commits have it.
NOT_OF_TWINS = ":".join(
    f"Isa/{suite}Test.*/emulated_*"
    for suite in (
        "Threads",
        "Nonfinite",
        "SplitKeys",
        "Options",
        "Sharing",
        "SharedMasks",
        "Spans",
    )
)
# Of the sanitized suite that every commit has: checks that take 42 of the 100 seconds that its
# kernels are compiled (one core of a Zen 4), and find what AddressSanitizer finds as well, or what
# no x86 minds. The slices have them.
LEFT_OUT = "alignment,null,object-size,pointer-overflow"
# And it has the kernels of AVX2 alone, which are compiled with sanitizers.
NOT_SANITIZED = ":".join(f"*/{isa}" for isa in ("generic", "avx512*", "amx", "emulated_*"))


def pytest(options: str, suite: str) -> str:
    """Leaves the CPU seconds of each test file in build/test-logs (tests/gate/costs.py)."""
    return f"QKV_TEST_COSTS=build/test-logs/{suite} python -m pytest -rfEs {options}"


def missing(*programs: str) -> str:
    """Why a task that needs these cannot run, or ""."""
    return ", ".join(f"no {name}" for name in programs if not shutil.which(name))


def build(twins, targets: str, sanitized: str = "isa/avx2;isa/neon", without: str = LEFT_OUT):
    """sanitized, without: CMake's QKV_SANITIZED_ISAS and _WITHOUT. The tree keeps them."""
    configure = (
        f"cmake -S . -B {BUILD} -DQKV_TESTS=ON '-DQKV_EMULATED_ISAS={';'.join(twins)}' "
        f"'-DQKV_SANITIZED_ISAS={sanitized}' -DQKV_SANITIZED_WITHOUT={without} "
        ">build/test-logs/configure.log 2>&1 || { cat build/test-logs/configure.log; exit 1; }"
    )
    return f"{configure}\ncmake --build {BUILD} {JOBS} --target {targets}"


def build_sanitized(twins) -> str:
    """The kernels of every instruction set under sanitizers."""
    return build(twins, "qkv_csrc_tests_sanitized", "isa/.*;emulated/.*", without="")


def truth(ordinary: str, reproducible: str) -> str:
    """Two draws: in the second, results have the same bits on every instruction set, too."""
    return f"python tests/truth {ordinary}\npython tests/truth --reproducible {reproducible}"


def on_each(isas, command: str) -> str:
    """The command by each of these instruction sets, for what only ever takes the default."""
    return "\n".join(f"echo '--- {isa}'; QKV_ISA={isa} {command}" for isa in isas)


def csrc_sanitized() -> Task:
    """AVX2's kernels, and what is not about instruction sets, under sanitizers. The task is one
    core's, since most of it is one compilation of a minute."""
    sanitized = build(TWINS, "qkv_csrc_tests_sanitized")
    run = f"{SANITIZED} '--gtest_filter=-{NOT_SANITIZED}'"
    return Task("csrc-sanitized", f"{sanitized}\n{run}", cores=1)


def quick() -> list[Task]:
    no_valgrind = missing("valgrind")
    targets = "qkv_csrc_tests qkv_torch_tests"
    targets += " qkv_with_emulated" * bool(TWINS) + " qkv_instructions" * (not no_valgrind)
    tests = ("build",)
    no_twins = "" if TWINS else "this CPU multiplies bf16 in both ways"
    return [
        Task("build", build(TWINS, targets), is_build=True),
        Task(
            "python",
            pytest(f"{BY_FILE} tests/python --ignore-glob='*/test_distributed_*'", "python"),
        ),
        # One world of processes after the other, each of which has as many as there are ranks, and
        # waits half of the time.
        Task("distributed", pytest(DISTRIBUTED, "distributed"), cores=1),
        Task("docs", "tests/site.sh", cores=1),
        # Its wheel is built in the same tree, in which nothing else may be built meanwhile.
        Task("package", "tests/package.sh quick", tests, cores=1),
        Task("csrc", f"{CSRC} '--gtest_filter=-{NOT_OF_TWINS}'", tests),
        Task(
            "torch_ext",
            f"OMP_WAIT_POLICY=passive {BUILD}/qkv_torch_tests --gtest_brief=1",
            tests,
            cores=1,
        ),
        Task(
            "python-emulated",
            f"tests/emulation/twins.sh {BUILD} '{' '.join(TWINS)}' {ARITHMETIC} {BY_FILE} -rfEs",
            tests,
            skip=no_twins,
        ),
        Task("truth", truth("--calls 100 --seed 0", "--calls 40 --seed 0"), cores=1),
        Task(
            "instructions",
            "python tests/instructions",
            tests,
            cores=1,
            skip=no_valgrind,
        ),
    ]


def long(seed: int, calls: int) -> list[Task]:
    """seed: of everything that is drawn. calls: of the fuzzers on each instruction set."""
    again = f"tests/python --long --hypothesis-seed={seed} {WORKERS}"
    sanitized = "tests/sanitized_torch.sh run"
    tests, sanitized_torch = ("build",), ("build-sanitized-torch",)
    return [
        Task(
            "build",
            f"{build(ALL_TWINS, 'all qkv_with_emulated')}\n{build_sanitized(ALL_TWINS)}",
            is_build=True,
        ),
        Task("headers", "tests/headers.sh"),
        Task("csrc", CSRC, tests),
        Task("csrc-sanitized", SANITIZED, tests),
        Task(
            "csrc-aarch64",
            "tests/emulation/aarch64.sh",
            skip=missing("aarch64-linux-gnu-g++", "qemu-aarch64"),
        ),
        Task("csrc-clang", "tests/clang.sh", skip=missing("clang++")),
        Task("csrc-threads", "tests/tsan.sh", skip=missing("clang++")),
        Task(
            "torch_ext",
            on_each(qkv.supported_isas(), f"{BUILD}/qkv_torch_tests --gtest_brief=1"),
            tests,
        ),
        Task("python", pytest(again, "python")),
        Task("package", "tests/package.sh long", tests),
        Task(
            "python-emulated",
            f"tests/emulation/twins.sh {BUILD} '{' '.join(ALL_TWINS)}' tests/python --long "
            f"--hypothesis-seed={seed} {WORKERS} -rfEs",
            tests,
        ),
        Task("fuzz", f"python tests/fuzz --seed {seed} --calls {calls}"),
        Task(
            "truth",
            truth(f"--seed {seed} --calls {calls}", f"--seed {seed} --calls {calls // 10}"),
        ),
        Task("mutants", "python tests/mutants"),
        Task("build-sanitized-torch", "tests/sanitized_torch.sh build", is_build=True),
        Task(
            "torch_ext-sanitized",
            f"{sanitized} build/sanitized-torch/qkv_torch_tests --gtest_brief=1",
            sanitized_torch,
        ),
        Task(
            "fuzz-sanitized",
            f"{sanitized} python tests/fuzz --seed {seed} --calls {calls // 10}",
            sanitized_torch,
        ),
    ]
