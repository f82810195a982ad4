#!/usr/bin/env bash
# The Arm wheel, on a CPU that is not Arm: examples/cpp is cross-compiled with find_package(qkv) against the
# wheel and torch's own Arm libraries, and learns under qemu. Some minutes, and 440 MB of downloads.
#
#   tests/emulation/aarch64_wheel.sh dist/qkv-0.1.0-py3-none-manylinux_2_26_aarch64.whl 2.13.0
#
# Needs aarch64-linux-gnu-g++ and qemu-aarch64. Python's tests do not run here: torch's Arm wheel is a
# CUDA build, whose Python library does not load without all of Nvidia's.
set -euo pipefail
cd "$(dirname "$0")/../.."

wheel=$1
version=$2
platform=manylinux_2_28_aarch64
work=build/aarch64-wheel
rm -rf "$work"
mkdir -p "$work"

site=$(dirname "$(python release/fetch_torch.py "$version" --platform "$platform" --all-libraries)")
rm -rf "$site"/qkv*
python -m zipfile --extract "$wheel" "$site"
# What libtorch_cpu.so asks for in a CUDA build, though nothing of it is called.
python -m pip download --quiet --disable-pip-version-check --no-deps --only-binary :all: --dest "$work" \
  --platform "$platform" --platform manylinux_2_25_aarch64 --platform manylinux_2_17_aarch64 \
  'nvidia-cuda-runtime<14' 'nvidia-cuda-cupti<14'
for nvidia in "$work"/nvidia_*.whl; do
  python -m zipfile --extract "$nvidia" "$site"
done

# A system for qemu: torch reads what kind of Arm it runs on, and would read this machine's files.
root=$work/root
mkdir -p "$root/proc"
ln -s /usr/aarch64-linux-gnu/lib "$root/lib"
for cpu in 0 1; do
  registers=$root/sys/devices/system/cpu/cpu$cpu/regs/identification
  mkdir -p "$registers"
  echo 0x00000000413fd0c1 >"$registers/midr_el1" # Neoverse N1
  printf '%s\n' "processor : $cpu" 'Features : fp asimd aes crc32 atomics fphp asimdhp asimdrdm asimddp' \
    'CPU implementer : 0x41' 'CPU architecture: 8' 'CPU variant : 0x3' 'CPU part : 0xd0c' \
    'CPU revision : 1' '' >>"$root/proc/cpuinfo"
done

cmake -S examples/cpp -B "$work/phone_book" --toolchain "$PWD/cmake/aarch64-linux-gnu.cmake" \
  -Dqkv_DIR="$site/qkv/share/cmake/qkv" >"$work/configure.log" || { cat "$work/configure.log"; exit 1; }
cmake --build "$work/phone_book"
qemu-aarch64 -cpu neoverse-n1 -L "$root" -E OMP_NUM_THREADS=2 \
  -E LD_LIBRARY_PATH="$site/torch/lib:$site/nvidia/cu13/lib" \
  "$work/phone_book/phone_book" | tee "$work/output"
grep -q 'accuracy 1.000' "$work/output"
