#!/usr/bin/env bash
# The torch side under AddressSanitizer and UndefinedBehaviorSanitizer: a sanitized libqkv.so, its
# GoogleTests, and Python with both.
#
#   tests/sanitized_torch.sh build                      the library and the tests, into build/sanitized-torch
#   tests/sanitized_torch.sh run python tests/fuzz      anything that imports qkv
#   tests/sanitized_torch.sh run build/sanitized-torch/qkv_torch_tests
#
# Neither Python nor torch is sanitized. So libasan is loaded before them; leaks, of which torch has
# many at its end, are not looked for (tests/python/test_leaks.py does that); and what torch's own
# code does outside of ours goes unseen. MAX_JOBS limits compiling.
set -euo pipefail
cd "$(dirname "$0")/.."

tree=build/sanitized-torch
package=$tree/package/qkv # what Python finds instead of the installed one

build() {
  cmake -S . -B "$tree" -G Ninja -DQKV_TESTS=ON -DQKV_SANITIZE=ON \
    -DCMAKE_PREFIX_PATH="$(python -c 'import torch; print(torch.utils.cmake_prefix_path)')" \
    >"$tree.log" 2>&1 || { cat "$tree.log"; exit 1; }
  cmake --build "$tree" ${MAX_JOBS:+--parallel "$MAX_JOBS"} --target qkv qkv_torch_tests
  mkdir -p "$package"
  cmake --install "$tree" --prefix "$package" >/dev/null
  # Copies: a link would lead _library.py back to the library that is not sanitized.
  find torch_ext/qkv -mindepth 1 -maxdepth 1 ! -name lib ! -name include ! -name share \
    -exec cp -r {} "$package" \;
}

# libstdc++ beside libasan, which looks for its functions when the program starts.
run() {
  local libraries
  libraries="$(g++ -print-file-name=libasan.so) $(g++ -print-file-name=libstdc++.so)"
  # allocator_may_return_null: calls with too large sizes get their error, as without sanitizers.
  LD_PRELOAD=$libraries PYTHONPATH=$tree/package OMP_WAIT_POLICY=passive \
    ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1:detect_odr_violation=0 \
    UBSAN_OPTIONS=print_stacktrace=1 "$@"
}

"$@"
