#!/usr/bin/env bash
# One wheel for several torches: the kernels once, the operators once per minor version of torch.
#
#   release/wheel.sh 2.13.0 2.14.1 2.15.0                     into dist/
#   ARCH=aarch64 release/wheel.sh 2.13.0 2.14.1 2.15.0        the same for Arm, with Debian's cross compiler
#
# auditwheel gives it its tag, which says the oldest glibc it runs on, by the versions of all symbols
# of glibc and libstdc++ that it asks for. torch's libraries and its OpenMP stay out of it. MAX_JOBS
# limits compiling.
set -euo pipefail
cd "$(dirname "$0")/.."

here=$(uname -m)
arch=${ARCH:-$here}
another=()
if [ "$arch" != "$here" ]; then
  .ci/packages "$arch-linux-gnu-g++"
  another=(--platform "manylinux_2_28_$arch")
  export CMAKE_TOOLCHAIN_FILE=$PWD/cmake/$arch-linux-gnu.cmake
  export CXX=$arch-linux-gnu-g++ # which preflight.py looks at, and the toolchain takes
  export _PYTHON_HOST_PLATFORM=linux-$arch # which platform Python takes itself to be built for
fi

torches=()
for version in "$@"; do
  torches+=("$(python release/fetch_torch.py "$version" "${another[@]}")")
done
QKV_TORCHES=$(IFS=:; echo "${torches[*]}")
export QKV_TORCHES

built=build/wheel-$arch
rm -rf "$built"
python -m pip wheel --quiet --disable-pip-version-check --no-build-isolation --no-deps -w "$built" .
auditwheel repair --wheel-dir "$built/tagged" \
  --exclude libtorch_cpu.so --exclude libc10.so --exclude libgomp.so.1 "$built"/qkv-*.whl

# torch's own wheels run on glibc 2.28. For what keeps this one from asking for more: csrc/common/old_glibc.h.
wheel=$(echo "$built"/tagged/qkv-*.whl)
glibc=$(sed -E 's/.*manylinux_2_([0-9]+)_.*/\1/' <<<"$wheel")
if ! [ "$glibc" -le 28 ]; then
  auditwheel show "$wheel" >&2
  echo "$wheel needs a newer glibc than torch, 2.28" >&2
  exit 1
fi
mkdir -p dist
mv "$wheel" dist
echo "dist/$(basename "$wheel")"
