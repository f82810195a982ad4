// What products could do at best, for probe/.
#pragma once

#include <cstdint>

namespace qkv {

// A loop of multiply-adds on registers.
struct PeakLoop {
  const char* instruction;  // "FMA", "vdpbf16ps" or "tdpbf16ps"
  int flops;                // of one iteration, a multiply-add counted as two
  double (*run)(int64_t iterations);
};

}  // namespace qkv
