#!/usr/bin/env bash
# Looks for data races in the drivers: builds the torch-free tests with Clang's ThreadSanitizer and
# runs those that have several threads. Arguments go to the tests; --gtest_filter replaces ours.
#
#   tests/tsan.sh [--gtest_filter=...]
#
# Needs Debian's clang, libclang-rt-dev, libomp-dev (with Archer, which tells ThreadSanitizer of
# OpenMP's barriers) and libgtest-dev. MAX_JOBS limits compiling.
set -euo pipefail
cd "$(dirname "$0")/.."

build=build/tsan
mkdir -p "$build"
# The other instruction sets would be compiled for no test of these.
cmake -S . -B "$build" -G Ninja -DQKV_TORCH=OFF -DQKV_TESTS=ON -DQKV_SANITIZE=thread \
  -DQKV_AVX512=OFF -DQKV_EMULATED_ISAS= \
  -DCMAKE_CXX_COMPILER=clang++ -DCMAKE_CXX_FLAGS=-DQKV_QUICK_TESTS \
  >"$build/configure.log" 2>&1 || { cat "$build/configure.log"; exit 1; }
cmake --build "$build" ${MAX_JOBS:+--parallel "$MAX_JOBS"} --target qkv_csrc_tests

# The resource folder is lib/clang/<version> of the LLVM that Archer is a part of.
OMP_TOOL_LIBRARIES=$(realpath "$(clang++ -print-resource-dir)/../../libarcher.so")
[ -f "$OMP_TOOL_LIBRARIES" ] || { echo "No libarcher.so beside clang++: install libomp-dev" >&2; exit 1; }
export OMP_TOOL_LIBRARIES
# libomp itself is not instrumented, and is not what we look for races in. A forked child of several
# threads is what AfterFork is about.
export TSAN_OPTIONS="ignore_noninstrumented_modules=1 die_after_fork=0 halt_on_error=1 ${TSAN_OPTIONS:-}"
# One instruction set has all there is to know of the drivers, the pairs' drivers are the same.
filter='*ThreadsTest*/generic:*ThreadsTest*/avx2:Nested*:Team*:WorkList*:*Spans*/generic:*Spans*/avx2'
filter+=':*Sharing*/generic:*Sharing*/avx2:*SharedMasks*/generic:*Options*/generic'
"$build/qkv_csrc_tests" --gtest_brief=1 --gtest_filter="$filter" "$@"
