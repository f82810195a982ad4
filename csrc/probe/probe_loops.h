// The loops behind probe_peak: multiply-adds on registers, and nothing else.
#pragma once

#include <cstdint>

#include "attention.h"

namespace qkv {

struct ProbeLoop {
  const char* isa;
  DType dtype;              // of the factors
  const char* instruction;  // "FMA", "vdpbf16ps" or "tdpbf16ps"
  int flops;                // of one iteration, a multiply-add counted as two
  void (*run)(int64_t iterations);
};

// What `isa` computes products of `dtype` with; half precision is widened to f32
// where there is nothing better. Throws std::invalid_argument for an isa this CPU cannot run.
const ProbeLoop& find_probe_loop(const char* isa, DType dtype);

}  // namespace qkv
