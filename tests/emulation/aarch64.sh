#!/usr/bin/env bash
# Builds the torch-free tests for 64-bit Arm, cut down for slow machines, and runs them under
# qemu-user, on all cores. Arguments go to the tests.
#
#   tests/emulation/aarch64.sh [--gtest_filter=...]
#   tests/emulation/aarch64.sh quick    without what threads, splits, memory and options do: the
#                                       same code on every instruction set, between vectors that
#                                       differ; two minutes instead of hours
#
# Needs Debian's g++-aarch64-linux-gnu, qemu-user and libgtest-dev. MAX_JOBS limits compiling.
set -euo pipefail
cd "$(dirname "$0")/../.."

build=build/aarch64
mkdir -p "$build"

cmake -S . -B "$build" -G Ninja --toolchain cmake/aarch64-linux-gnu.cmake -DQKV_TORCH=OFF \
  -DQKV_TESTS=ON -DQKV_EMULATED_ISAS= -DCMAKE_CXX_FLAGS=-DQKV_QUICK_TESTS >"$build/configure.log" 2>&1 ||
  { cat "$build/configure.log"; exit 1; }
tests/headers.sh aarch64-linux-gnu-g++ csrc/isa/neon
cmake --build "$build" ${MAX_JOBS:+--parallel "$MAX_JOBS"} --target qkv_csrc_tests

# Left out: generic code and emulated instructions, which the host's own tests cover, and what needs
# a limit on memory, which qemu does not pass on.
filter='-*/generic:*/emulated_*:Memory.WorkspaceThatCannotBeHad'
if [ "${1:-}" = quick ]; then
  shift
  filter+=':NestedRegion.*:Reference*:Memory.*'
  for suite in Threads SplitKeys Sharing SharedMasks Spans Options Nonfinite; do filter+=":Isa/${suite}Test.*"; done
fi
OMP_WAIT_POLICY=passive OMP_NUM_THREADS=2 tests/in_shards.sh \
  qemu-aarch64 -L /usr/aarch64-linux-gnu "$build/qkv_csrc_tests" --gtest_filter="$filter" "$@"
