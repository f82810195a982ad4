#!/usr/bin/env bash
# What people get: the source distribution and the wheel, built for the torch of this environment and
# installed into a clean environment outside of the checkout.
#
#   tests/package.sh quick              the sdist has every file; the wheel, built in the tree that is there
#                                       already, is imported from a folder beside this environment's torch,
#                                       and the C++ examples and the tests of the package run on it
#   tests/package.sh long               the wheel is built from the sdist; all of the quick Python suite
#   tests/package.sh wheel FILE TORCH [TEST...]
#                                       the quick Python suite, or these tests, on this wheel and this torch
#                                       (2.15.0), with the Python that PYTHON names
#
# The virtual environment is first in PATH.
set -euo pipefail
cd "$(dirname "$0")/.."

checkout=$PWD
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
tests_of_the_package=(tests/python/test_{package,cpp_examples}.py)

# torch_here: its version. A wheel that is there already needs no torch beside the tools that check it.
torch_here() {
  python -c 'import importlib.metadata as m; print(m.version("torch").split("+")[0])'
}

# build_sdist: every tracked file is in it but those of CI and git. Unpacked into $work/sdist.
build_sdist() {
  python -m build --no-isolation --sdist --outdir "$work" . >"$work/sdist.log" 2>&1 ||
    { cat "$work/sdist.log"; return 1; }
  mkdir "$work/sdist"
  tar -xzf "$work"/qkv-*.tar.gz -C "$work/sdist" --strip-components=1
  if git -c safe.directory="$PWD" ls-files >"$work/tracked"; then
    local file
    grep -v '^\.' "$work/tracked" | while read -r file; do
      cmp "$file" "$work/sdist/$file" || return 1
    done
  else
    echo "SKIPPED: without git nobody knows what the source distribution should hold"
  fi
  twine check "$work"/qkv-*.tar.gz
}

# build_wheel SOURCES: for the torch of this environment. Sets `wheel`.
build_wheel() {
  "$1/release/wheel.sh" "$(torch_here)" >"$work/wheel.log" 2>&1 || { cat "$work/wheel.log"; return 1; }
  wheel=$1/$(tail -n 1 "$work/wheel.log")
}

# check_wheel: tags, contents, and no path of this machine in any file.
check_wheel() {
  check-wheel-contents "$wheel"
  twine check "$wheel"
  python -m zipfile --extract "$wheel" "$work/unpacked"
  local place
  for place in "$checkout" "$work" "$(python -c 'import sys; print(sys.prefix)')"; do
    if grep -rlF -- "$place" "$work/unpacked"; then
      echo "these files of the wheel name $place"
      return 1
    fi
  done
}

# run_tests TORCH PYTEST_ARGUMENT...: in a new environment with that torch and the wheel.
run_tests() {
  local torch=$1 env=$work/env
  shift
  "${PYTHON:-python}" -m venv "$env"
  "$env/bin/python" -m pip install --quiet --disable-pip-version-check \
    "torch==$torch" "$wheel[bench,viz]" numpy pytest pytest-xdist hypothesis expecttest cmake ninja
  pytest_outside "$env/bin" "$@"
}

# pytest_outside PROGRAMS PYTEST_ARGUMENT...: on a copy of the tests beside which there are no sources.
# What Python compiles is left out: suites that run beside this one write it under other names first,
# and copying fails where such a file is gone by the time that its turn comes.
pytest_outside() {
  local programs=$1
  shift
  mkdir "$work/outside"
  tar -c --exclude=__pycache__ tests benchmarks examples docs *.md pyproject.toml | tar -x -C "$work/outside"
  (cd "$work/outside" && PATH=$programs:$PATH "$programs/python" -m pytest -rfEs \
    --numprocesses=auto --maxprocesses=8 --dist=loadfile --no-loadscope-reorder "$@")
}

quick() {
  build_sdist
  build_wheel .
  check_wheel
  # This environment has what the wheel asks for. The folder, which PYTHONPATH puts before the
  # checkout, has qkv and torch beside each other, as site-packages has.
  python -m pip install --quiet --disable-pip-version-check --no-deps --target "$work/site" "$wheel"
  ln -s "$(python -c 'import torch; print(torch.__path__[0])')" "$work/site/torch"
  export PYTHONPATH=$work/site
  pytest_outside "$(dirname "$(command -v python)")" "${tests_of_the_package[@]}"
}

long() {
  build_sdist
  build_wheel "$work/sdist"
  check_wheel
  run_tests "$(torch_here)" tests/python
}

wheel() {
  local torch=$2
  wheel=$1
  shift 2
  check_wheel
  run_tests "$torch" "${@:-tests/python}"
}

"$@"
