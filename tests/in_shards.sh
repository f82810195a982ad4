#!/usr/bin/env bash
# tests/in_shards.sh COMMAND...: runs a GoogleTest program once for each core, each with its share
# of the tests, and prints what is worth reading. Fails if one of them does. QKV_PART=K/N takes one of
# N parts of them, K = 0 up to N - 1.
set -euo pipefail

shards=$(nproc)
outputs=$(mktemp -d)
pids=()
trap 'kill "${pids[@]}" 2>/dev/null || true; rm -rf "$outputs"' EXIT

part=${QKV_PART:-0/1}
export GTEST_TOTAL_SHARDS=$((shards * ${part#*/}))
# Threads that wait sleep: where they spin, the other shards, which want the same cores, wait as well.
export OMP_WAIT_POLICY=passive
for ((i = 0; i < shards; ++i)); do
  GTEST_SHARD_INDEX=$((shards * ${part%/*} + i)) "$@" >"$outputs/$i" 2>&1 &
  pids+=($!)
done

status=0
for ((i = 0; i < shards; ++i)); do
  wait "${pids[i]}" || status=1
  # A skipped test's reason is on the line after "Skipped".
  sed -E '/: Skipped$/{N; s/\n/: /}' "$outputs/$i" |
    grep -vE '^($|Note|\[( RUN  |       OK | DISABLED |-{10}))' || true
done
exit $status
