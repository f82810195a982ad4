#!/usr/bin/env bash
# All that a release uploads, built and checked, in dist/, which is emptied first:
#
#   release/all.sh                                          for the newest of each torch that qkv knows
#   release/all.sh 2.13.0                                   for these torches
#   ARCH="x86_64 aarch64" release/all.sh 2.13.0 2.14.1      a wheel for each kind of CPU; see wheel.sh
#
# `make release` runs it with the tools of requirements/release.txt. It uploads nothing.
set -euo pipefail
cd "$(dirname "$0")/.."

torches=("$@")
[ $# -gt 0 ] || read -ra torches < <(python -c 'import preflight; print(*preflight.KNOWN)')

rm -rf dist
python -m build --no-isolation --sdist .
for arch in ${ARCH:-$(uname -m)}; do
  ARCH=$arch release/wheel.sh "${torches[@]}"
done
twine check --strict dist/*
check-wheel-contents dist/*.whl
python release/sbom.py dist/*.whl
python release/conda/render.py dist/*.tar.gz
release/report.sh

cd dist
find . -type f -printf '%P\n' | sort | xargs sha256sum >../build/SHA256SUMS
mv ../build/SHA256SUMS .
sha256sum --check --quiet SHA256SUMS
cat SHA256SUMS
