// What this machine can do at best: the figures a kernel's speed is held against.
#pragma once

#include <cstddef>

#include "attention.h"
#include "export.h"

namespace qkv {

struct PeakRate {
  const char* instruction;  // "FMA", "vdpbf16ps" (AVX512-BF16) or "tdpbf16ps" (AMX)
  double gflops;
};

// The most multiply-adds of factors in `dtype` that `num_threads` threads do
// together with the instructions of `isa`, a multiply-add counted as two. Half
// precision where `isa` multiplies none: that of f32, to which it is widened; in
// "generic" on x86 a multiply and an add. Registers only, no memory. Takes about half
// a second. Throws std::invalid_argument for an isa this CPU cannot run, num_threads < 1.
QKV_CORE_API PeakRate probe_peak(const char* isa, DType dtype, int num_threads);

// The rate at which `num_threads` threads read a buffer of `bytes` together,
// each its own part of it, in one place or four at a time, whichever is faster; in
// GB/s (1e9). That of memory, not of a cache, when `bytes` is uncached_bytes() or
// more. Throws std::invalid_argument for num_threads < 1 or less than 4096 bytes a
// thread, std::bad_alloc when the buffer cannot be had.
QKV_CORE_API double probe_read_bandwidth_gbs(int num_threads, size_t bytes);

// A buffer size that no cache of this machine holds a useful part of.
QKV_CORE_API size_t uncached_bytes();

}  // namespace qkv
