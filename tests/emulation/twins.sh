#!/usr/bin/env bash
# Every Python test that runs in bf16, on the emulated twins of the instruction sets that multiply
# bf16 (tests/csrc/emulated): on any CPU, and to every bit as on one that has them (PairsTest).
#
#   tests/emulation/twins.sh BUILD 'avx512bf16 amx' tests/python [PYTEST_OPTION...]
#
# BUILD: a CMake tree in which qkv_with_emulated is built, with these instruction sets.
set -euo pipefail
cd "$(dirname "$0")/../.."

build=$1
read -ra isas <<<"$2"
shift 2
export QKV_LIBRARY=$PWD/$build/emulated/libqkv.so
status=0
for isa in "${isas[@]/#/emulated_}"; do
  QKV_ISA=$isa QKV_TEST_ISAS=$isa python -m pytest --only-bf16 "$@" || status=1
done
exit $status
