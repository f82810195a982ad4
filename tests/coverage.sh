#!/usr/bin/env bash
# Which lines the quick suites run: of csrc/ and torch_ext/ by gcov, of the package by coverage.py.
#
#   tests/coverage.sh          builds, runs the suites and prints both; about half an hour on two cores
#   tests/coverage.sh report   prints once more what the last run left in build/coverage
#
# The library is compiled for generic code, AVX2 and the emulated AMX, and counts on any number of
# threads; the reference is not, since it would take most of the time. A line of a template counts as
# run if one of its instances was. gcovr and pytest-cov are installed into this environment.
set -euo pipefail
cd "$(dirname "$0")/.."

tree=build/coverage
export QKV_QUICK_TESTS=1 PYTHONPATH=$PWD/torch_ext
export OMP_WAIT_POLICY=passive COVERAGE_FILE=$PWD/$tree/python

build() {
  python -m pip install --quiet gcovr pytest-cov
  cmake -S . -B "$tree" -G Ninja -DCMAKE_BUILD_TYPE=Coverage -DQKV_TESTS=ON -DQKV_AVX512=OFF \
    -DQKV_EMULATED_ISAS=amx -DCMAKE_CXX_FLAGS="-O2 --coverage -fprofile-abs-path -fprofile-exclude-files=.*/tests/.*" \
    -DCMAKE_PREFIX_PATH="$(python -c 'import torch; print(torch.utils.cmake_prefix_path)')" \
    >"$tree.log" 2>&1 || { cat "$tree.log"; exit 1; }
  cmake --build "$tree" ${MAX_JOBS:+--parallel "$MAX_JOBS"} --target qkv qkv_csrc_tests qkv_torch_tests
  find "$tree" -name '*.gcda' -delete
  printf '[run]\nsource_pkgs = qkv\npatch = subprocess\nparallel = true\n' >"$tree/coveragerc"
}

# A test that fails still ran its lines, and some count what an instrumented library does more.
run() {
  QKV_LIBRARY=$(find "$PWD/$tree/lib" -name libqkv.so)
  export QKV_LIBRARY
  tests/in_shards.sh "$tree/qkv_csrc_tests" --gtest_brief=1 '--gtest_filter=-*avx512bf16' || true
  "$tree/qkv_torch_tests" --gtest_brief=1 || true
  python tests/truth --calls 150 --seed 0 || true
  python -m pytest -q --tb=no --numprocesses=auto --maxprocesses=8 --cov=qkv --cov-report= \
    --cov-config="$tree/coveragerc" tests/python || true
}

report() {
  python -m gcovr --root . --object-directory "$tree" --filter csrc/ --filter torch_ext/ \
    --gcov-ignore-errors=all --merge-mode-functions=separate --txt "$tree/lines.txt" --print-summary \
    --json-summary "$tree/lines.json" -j "$(nproc)" "$tree"
  python -m coverage combine --quiet --append 2>/dev/null || true
  python -m coverage report --skip-covered | tail -40
}

mkdir -p "$tree"
case ${1:-all} in
  report) report ;;
  all) build && run && report ;;
esac
