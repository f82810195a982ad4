#!/usr/bin/env bash
# Builds the torch-free library and its tests with Clang, a second opinion on what the language
# allows, warnings being errors, and runs them; compiles each header by itself, too. Arguments go to
# the tests.
#
#   tests/clang.sh [--gtest_filter=...]
#
# Needs Debian's clang, libomp-dev and libgtest-dev. MAX_JOBS limits compiling.
set -euo pipefail
cd "$(dirname "$0")/.."

build=build/clang
mkdir -p "$build"
cmake -S . -B "$build" -G Ninja -DQKV_TORCH=OFF -DQKV_TESTS=ON -DCMAKE_CXX_COMPILER=clang++ \
  -DCMAKE_CXX_FLAGS=-Werror >"$build/configure.log" 2>&1 || { cat "$build/configure.log"; exit 1; }
tests/headers.sh clang++
cmake --build "$build" ${MAX_JOBS:+--parallel "$MAX_JOBS"} --target qkv_csrc_tests
tests/in_shards.sh "$build/qkv_csrc_tests" --gtest_brief=1 "$@"
