// The loops behind probe_peak: multiply-adds on registers, and nothing else.
#pragma once

#include <cstdint>

#include "common/tensor.h"

namespace qkv {

struct ProbeLoop {
  const char* isa;
  DType dtype;              // of the factors
  const char* instruction;  // "FMA", "vdpbf16ps" or "tdpbf16ps"
  int flops;                // of one iteration, a multiply-add counted as two
  void (*run)(int64_t iterations);
};

// The loop for products of `dtype` in `isa`; for half precision that `isa` does not multiply, that
// of f32, to which the kernels widen it. Throws std::invalid_argument for an isa that this CPU
// cannot run.
const ProbeLoop& find_probe_loop(const char* isa, DType dtype);

}  // namespace qkv
