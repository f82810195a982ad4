# What tests/run and tests/run-long share; they source it, in the repository's root.
#
# A suite's output goes to the terminal and to build/test-logs. closing_lines repeats how each suite
# ended, how many tests it ran, which failed, and what was skipped and why.

# The tree in which setup.py has already built the library, so that nothing is compiled twice.
build=build/torch-$(python -c 'import torch; print(".".join(torch.__version__.split(".")[:2]))')
sanitized=build/sanitized
logs=build/test-logs
mkdir -p "$logs"
status=0
closing=()

# Each test runs a little on many threads and much on one. -rs: what is skipped, and why.
pytest_options=(-rs --numprocesses=auto --maxprocesses=8)

# build_tree FOLDER CMAKE_OPTION...: all of it; the configuration is silent unless it fails.
build_tree() {
  cmake -S . -B "$@" -DQKV_TESTS=ON >"$logs/configure.log" 2>&1 ||
    { cat "$logs/configure.log"; exit 1; }
  cmake --build "$1" ${MAX_JOBS:+--parallel "$MAX_JOBS"}
}

build_library_tests() { build_tree "$build"; }
# build_sanitized_kernels CMAKE_OPTION...
build_sanitized_kernels() {
  build_tree "$sanitized" -G Ninja -DQKV_TORCH=OFF -DQKV_SANITIZE=ON "$@"
}

# suite NAME COMMAND...
suite() {
  local name=$1 began=$SECONDS ended=passed
  shift
  echo
  echo "=== $name"
  "$@" 2>&1 | tee "$logs/$name.log" || { status=1; ended=FAILED; }
  closing+=("$name: $ended in $((SECONDS - began)) s" "$(said_last "$logs/$name.log")")
}

# on_every_isa COMMAND...: once by each instruction set of this CPU, for what only ever takes the
# default. A CPU without some of them must not be the first to see that default.
on_every_isa() {
  local isa
  for isa in $(python -c 'import qkv; print(*qkv.supported_isas())'); do
    echo "--- $isa"
    QKV_ISA=$isa "$@" || return
  done
}

# The lines of GoogleTest, pytest, the fuzzer and tests/headers.sh that count: each once. A suite that
# broke off may have none.
said_last() {
  local counts='^\[ *(PASSED|FAILED|ISA) *\].* test' pytest='^=+ .* in [0-9.]+s.*=+$|^(FAILED|ERROR) '
  local skipped=': Skipped: |^SKIPPED ' fuzz='^(seed| +once more:) ' again='^Once more: '
  local headers=' by (itself|themselves)$'
  { grep -E "$counts|$pytest|$skipped|$fuzz|$again|$headers" "$1" || true; } | cut -c 1-160 | awk '!seen[$0]++ { print "  " $0 }'
}

skip() {
  echo
  echo "=== $1 skipped: $2"
  closing+=("$1: SKIPPED, $2")
}

# needs SUITE PROGRAM...: whether all of them are there; skips the suite if not.
needs() {
  local name=$1 program
  shift
  for program in "$@"; do
    command -v "$program" >/dev/null || { skip "$name" "no $program"; return 1; }
  done
}

# The last command of a layer: its status is the layer's.
closing_lines() {
  echo
  echo "=== closing lines"
  printf '%s\n' "${closing[@]}" | grep -v '^$'
  return "$status"
}
