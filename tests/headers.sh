#!/usr/bin/env bash
# Compiles every header of csrc/ and of the reference by itself, as an editor with clangd does: it
# must include what it uses, and a kernel header, which isa/<name>/kernels.cpp compiles for an
# instruction set, is generic code then. Headers of another architecture than the compiler's are left
# out.
#
#   tests/headers.sh [COMPILER [FOLDER...]]
set -euo pipefail
cd "$(dirname "$0")/.."

compiler=${1:-c++}
folders=("${@:2}")
[ ${#folders[@]} -gt 0 ] || folders=(csrc tests/reference tests/csrc/emulated tests/csrc/parts)

case $("$compiler" -dumpmachine) in
  x86_64*) foreign='isa/neon/' ;;
  *) foreign='isa/(amx|avx)|cpuid' ;;
esac
headers=()
for header in $(find "${folders[@]}" -name '*.h' | sort); do
  [[ $header =~ $foreign ]] || grep -qE "#include \"($foreign)" "$header" || headers+=("$header")
done

# In the target region of an instruction set no standard header may be opened: it would make AVX code
# of functions that the whole program shares. All of them are in prelude.h, outside of the region.
if grep -n '#include <' $(grep -lE 'QKV_ISA \{' "${headers[@]}"); then
  echo "A header that is compiled in a target region includes a standard header: put it into kernels/prelude.h"
  exit 1
fi

check() {
  local path=${2#csrc/}
  printf '#include "%s"\n' "${path#tests/}" |
    "$1" -std=c++17 -fsyntax-only -Wall -Wextra -Werror -Wno-psabi -Icsrc -Itests/csrc -Itests -x c++ - ||
    { echo "$2 does not compile by itself"; return 1; }
}
export -f check
xargs -P "$(nproc)" -I{} bash -c 'check "$@"' check "$compiler" {} < <(printf '%s\n' "${headers[@]}")
echo "${#headers[@]} headers compile by themselves"
