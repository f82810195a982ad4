#!/usr/bin/env bash
# tests/in_shards.sh COMMAND...: runs a GoogleTest program once for each core, each with its share
# of the tests, and prints what is worth reading. Fails if one of them does.
set -euo pipefail

shards=$(nproc)
outputs=$(mktemp -d)
pids=()
trap 'kill "${pids[@]}" 2>/dev/null || true; rm -rf "$outputs"' EXIT

export GTEST_TOTAL_SHARDS=$shards
for ((i = 0; i < shards; ++i)); do
  GTEST_SHARD_INDEX=$i "$@" >"$outputs/$i" 2>&1 &
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
