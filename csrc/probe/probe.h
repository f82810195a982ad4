// Measures what this machine can do at best: the figures that a kernel's speed is held against.
#pragma once

#include <cstddef>

#include "common/tensor.h"
#include "export.h"

namespace qkv {

struct PeakRate {
  const char* instruction;  // "FMA", "vdpbf16ps" (AVX512-BF16) or "tdpbf16ps" (AMX)
  double gflops;
};

// The most multiply-adds of factors in `dtype` that `num_threads` threads together do in a second,
// in 1e9 operations, of which a multiply-add is two. The loops work on registers and never read
// memory. Where `isa` has no products of half precision, the rate is that of f32, to which the
// kernels widen it. "generic" on x86 has a multiply and an add in place of FMA. Takes about half a
// second. Throws std::invalid_argument for an isa that this CPU cannot run, and for num_threads <
// 1.
QKV_CORE_API PeakRate probe_peak(const char* isa, DType dtype, int num_threads);

// The rate in GB/s (1e9 bytes) at which `num_threads` threads together read a buffer of `bytes`,
// each its own share of it: in one place, or in four places at a time, whichever is faster. It is
// the rate of memory, and not of a cache, if `bytes` is at least uncached_bytes(). Throws
// std::invalid_argument for num_threads < 1 or less than 4096 bytes a thread, and std::bad_alloc if
// there is no memory for the buffer.
QKV_CORE_API double probe_read_bandwidth_gbs(int num_threads, size_t bytes);

// The bytes of a buffer that is too large for a cache of this machine to help: four times the
// third-level cache, and at least 512 MiB.
QKV_CORE_API size_t uncached_bytes();

}  // namespace qkv
