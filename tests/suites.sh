# What tests/run and tests/run-long share; they source it. Each suite's output goes to the terminal
# and to build/test-logs; closing_lines repeats what every suite said last, and what was skipped.
build=build/torch-$(python -c 'import torch; print(".".join(torch.__version__.split(".")[:2]))')
logs=build/test-logs
jobs=(${MAX_JOBS:+--parallel "$MAX_JOBS"})
mkdir -p "$logs"

status=0
closing=()

# build_tree FOLDER TARGET... -- CMAKE OPTIONS: silent unless it fails.
build_tree() {
  local folder=$1 targets=()
  shift
  while [ "$1" != -- ]; do
    targets+=("$1")
    shift
  done
  shift
  cmake -S . -B "$folder" -G Ninja -DQKV_TESTS=ON "$@" >"$logs/configure.log" 2>&1 ||
    { cat "$logs/configure.log"; return 1; }
  cmake --build "$folder" "${jobs[@]}" --target "${targets[@]}"
}

# suite NAME COMMAND...: runs it, remembers how it ended.
suite() {
  local name=$1 began=$SECONDS ended=passed
  shift
  echo
  echo "=== $name"
  "$@" 2>&1 | tee "$logs/$name.log" || { status=1; ended=FAILED; }
  closing+=("$name: $ended, $((SECONDS - began)) s"
    "$(grep -E "$what_counts" "$logs/$name.log" | cut -c 1-200 | sort | uniq -c | sed -E 's/^ +1 /  /; s/^ +([0-9]+) /  \1 times: /')")
}

# The lines of GoogleTest, pytest and the fuzzer that say how many, what failed, and what was
# skipped and why.
what_counts='^\[ +(PASSED|FAILED|ISA) +\].*[0-9]+ test|^=+ .* in [0-9.]+s.*=+$|^SKIPPED |^ERROR |Skipped: |^(seed|once more|again) '

skip() {
  echo
  echo "=== $1 skipped: $2"
  closing+=("$1: SKIPPED, $2")
}

# needs NAME PROGRAM...: skips the suite unless all are there.
needs() {
  local name=$1 program
  shift
  for program in "$@"; do
    command -v "$program" >/dev/null || { skip "$name" "no $program"; return 1; }
  done
}

closing_lines() {
  echo
  echo "=== closing lines"
  printf '%s\n' "${closing[@]}" | grep -v '^$'
  return $status
}
