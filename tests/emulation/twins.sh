#!/usr/bin/env bash
# Every Python test that runs in bf16, on the emulated twins of the instruction sets that multiply
# bf16 (tests/csrc/emulated): on any CPU, and to every bit as on one that has them (PairsTest).
#
#   tests/emulation/twins.sh BUILD [PYTEST_OPTION...]    BUILD: a CMake tree with tests and torch
set -euo pipefail
cd "$(dirname "$0")/../.."

build=$1
shift
cmake --build "$build" --target qkv_with_emulated >/dev/null
export QKV_LIBRARY=$PWD/$build/emulated/libqkv.so
status=0
for isa in emulated_avx512bf16 emulated_amx; do
  QKV_ISA=$isa QKV_TEST_ISAS=$isa python -m pytest tests/python --only-bf16 "$@" || status=1
done
exit $status
