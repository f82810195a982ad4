// What this machine can do at best: the figures a kernel's speed is held against.
#pragma once

#include <cstddef>

#include "attention.h"

namespace qkv {

// The most multiply-adds that `num_threads` threads do together with the
// vector instructions of `isa`, in GFLOP/s, a multiply-add counted as two:
// fused in "avx512" and "avx2", a multiply and an add in baseline instructions
// in "generic". Registers only, no memory. Takes about half a second.
// Throws std::invalid_argument for an isa this CPU cannot run, num_threads < 1.
double probe_fma_gflops(const char* isa, DType dtype, int num_threads);

// The rate at which `num_threads` threads read a buffer of `bytes` together,
// each its own part of it, in GB/s (1e9). That of memory, not of a cache, when
// `bytes` is uncached_bytes() or more. Throws std::invalid_argument for
// num_threads < 1 or less than 4096 bytes a thread, std::bad_alloc when the
// buffer cannot be had.
double probe_read_bandwidth_gbs(int num_threads, size_t bytes);

// A buffer size that no cache of this machine holds a useful part of.
size_t uncached_bytes();

}  // namespace qkv
