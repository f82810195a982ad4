#!/usr/bin/env bash
# Runs a statically linked Linux program on an emulated CPU that has AVX-512, whatever this
# machine's CPU: Bochs boots a Debian kernel whose first process is the program.
#
#   tests/emulation/avx512.sh program [arguments...]
#
# Prints what the program prints, exits with its status (128 + signal if it died of one, 125 if
# the emulator failed). The program sees the caller's QKV_*, OMP_* and GTEST_* variables, one
# CPU, and no files but its own and a busybox shell.
#
# The torch-free tests, cut down for slow machines; some 20 minutes:
#
#   cmake -B build/static -DQKV_TORCH=OFF -DQKV_TESTS=ON \
#     -DCMAKE_CXX_FLAGS=-DQKV_QUICK_TESTS -DCMAKE_EXE_LINKER_FLAGS=-static
#   cmake --build build/static --target qkv_csrc_tests
#   tests/emulation/avx512.sh build/static/qkv_csrc_tests --gtest_filter='*/avx512:Dispatch.*'
#
#   EMULATED_CPU        corei7_skylake_x: AVX-512 F CD BW DQ VL. Known to boot as well:
#                       corei7_haswell_4770 (AVX2), core2_penryn_t9600 (no AVX)
#   EMULATED_MEMORY_MB  1024
#   EMULATOR_TIMEOUT    1800, in seconds
#   EMULATOR_CACHE      build/emulation
#
# Debian only. What is missing is installed with apt, as root. Bochs computes each floating
# point operation in software and exactly; it says nothing about speed.
set -euo pipefail

here=$(cd "$(dirname "$0")" && pwd)
cpu=${EMULATED_CPU:-corei7_skylake_x}
memory=${EMULATED_MEMORY_MB:-1024}
limit=${EMULATOR_TIMEOUT:-1800}
cache=$(realpath -m "${EMULATOR_CACHE:-$here/../../build/emulation}")

fail() {
  echo "avx512.sh: $*" >&2
  exit 125
}

install_packages() {
  local package missing=()
  for package in bochs bochs-sdl busybox-static cpio isolinux syslinux-common xorriso binutils \
    gcc libc6-dev; do
    dpkg-query -W -f='${db:Status-Status}' "$package" 2>/dev/null | grep -q '^installed$' ||
      missing+=("$package")
  done
  [ ${#missing[@]} -eq 0 ] && return
  [ "$(id -u)" = 0 ] || fail "not root, and cannot install what it needs: ${missing[*]}"
  apt-get update -qq
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" \
    >"$cache/apt.log" 2>&1 || fail "apt-get install failed, see $cache/apt.log"
}

# Unpacked, not installed: installing a kernel builds an initramfs and wants a boot loader.
fetch_kernel() {
  [ -s "$cache/vmlinuz" ] && return
  local package
  package=$(apt-cache depends linux-image-cloud-amd64 | awk '/Depends: linux-image/ {print $2}')
  [ -n "$package" ] || fail "apt knows no linux-image-cloud-amd64: apt-get update?"
  (cd "$cache" && apt-get download -qq "$package" 2>/dev/null) || fail "cannot download $package"
  dpkg-deb --fsys-tarfile "$cache/$package"_*.deb | tar -xO --wildcards './boot/vmlinuz-*' \
    >"$cache/vmlinuz.part"
  mv "$cache/vmlinuz.part" "$cache/vmlinuz"
  rm "$cache/$package"_*.deb
}

# initramfs: init, the program, what to run it with, and a shell for programs that start others.
make_initramfs() {
  mkdir -p root/dev root/bin iso
  cp /bin/busybox root/bin/sh
  ln -s sh root/bin/env
  gcc -std=gnu11 -O2 -static -s -o root/init "$here/init.c"
  cp "$program" root/payload
  chmod +x root/payload
  strip root/payload
  {
    printf '%d\0' $#
    printf '%s\0' "$@" PATH=/bin
    env -0 | grep -zE '^(QKV|OMP|GTEST)_' || true
  } >root/job
  (cd root && find . | cpio -o -H newc --quiet) >iso/initrd
}

# The kernel's options: clearcpuid because Bochs and Linux disagree on the size of the compacted
# XSAVE area, and then Linux turns all of AVX off; the rest to boot sooner.
make_disc() {
  cp "$cache/vmlinuz" iso/vmlinuz
  cp /usr/lib/ISOLINUX/isolinux.bin /usr/lib/syslinux/modules/bios/ldlinux.c32 iso/
  cat >iso/isolinux.cfg <<END
DEFAULT linux
LABEL linux
  LINUX /vmlinuz
  INITRD /initrd
  APPEND console=ttyS0,115200 quiet clearcpuid=xsavec,xsaves mitigations=off nosmp acpi=off pci=off cryptomgr.notests initcall_blacklist=trace_eval_init
END
  xorriso -as mkisofs -quiet -b isolinux.bin -c boot.cat -no-emul-boot -boot-load-size 4 \
    -boot-info-table -o disc.iso iso 2>/dev/null
}

write_bochsrc() {
  cat >bochsrc <<END
display_library: sdl2
config_interface: textconfig
cpu: model=$cpu, count=1, ips=20000000, reset_on_triple_fault=0
memory: guest=$memory, host=$memory
romimage: file=/usr/share/bochs/BIOS-bochs-latest
vgaromimage: file=/usr/share/vgabios/vgabios.bin
ata0-master: type=cdrom, path=disc.iso, status=inserted
boot: cdrom
clock: sync=none, time0=utc
com1: enabled=1, mode=file, dev=console.log
port_e9_hack: enabled=1
log: bochs.log
panic: action=fatal
error: action=ignore
info: action=ignore
debug: action=ignore
plugin_ctrl: unmapped=1, biosdev=1, speaker=0, gameport=0, parallel=0
END
  echo c >commands  # Debian's Bochs starts in its debugger
}

# Prints what lies between init.c's two marks as it comes; the status goes to the file `status`.
show_output() {
  local line started=
  while IFS= read -r line; do
    if [[ $line =~ ^(.*)"[emulator: exit "([0-9]+)"]"$ ]]; then
      [ -z "${BASH_REMATCH[1]}" ] || echo "${BASH_REMATCH[1]}"
      echo "${BASH_REMATCH[2]}" >status
      started=
    fi
    [ -z "$started" ] || printf '%s\n' "$line"
    [ "$line" != "[emulator: begin]" ] || started=1
  done
}

# Not the term display: in a Bochs with a debugger it opens a pseudo-terminal that nobody reads, and
# blocks when that is full.
emulate() {
  mkfifo output
  show_output <output &
  local reader=$!
  SDL_VIDEODRIVER=dummy timeout -k 5 "$limit" bochs -q -f bochsrc -rc commands \
    </dev/null >output 2>bochs.err &
  emulator=$!
  wait "$emulator" || true
  wait "$reader" || true
}

main() {
  [ $# -ge 1 ] || fail "usage: $0 program [arguments...]"
  program=$(realpath "$1")
  [ -f "$program" ] || fail "no such program: $1"
  if readelf -lW "$program" | grep -q INTERP; then fail "$1 must be linked with -static"; fi
  local name status
  name=$(basename "$1")
  shift
  mkdir -p "$cache"
  install_packages
  fetch_kernel
  emulator=
  work=$(mktemp -d "$cache/run.XXXXXX")
  trap '[ -z "$emulator" ] || kill "$emulator" 2>/dev/null || true; rm -rf "$work"' EXIT
  cd "$work"
  make_initramfs "$name" "$@"
  make_disc
  write_bochsrc
  emulate
  if [ ! -s status ]; then
    cp console.log bochs.log bochs.err "$cache" 2>/dev/null || true
    fail "no exit status (the limit was $limit s): see console.log, bochs.log, bochs.err in $cache"
  fi
  status=$(cat status)
  [ "$status" -le 128 ] || echo "avx512.sh: $name died of signal $((status - 128))" >&2
  exit "$status"
}

main "$@"
