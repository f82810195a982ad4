// By whom products are made, where torch's own choice was measured to be slower: by oneDNN, which
// torch has beside MKL, or by the core library (few_rows.h).
#pragma once

#include <cstdint>
#include <limits>

namespace qkv::ops {

constexpr int64_t kNever = std::numeric_limits<int64_t>::max();

struct WhoMultiplies {
  // How many multiplications a product of float32 has at least that oneDNN makes: one of [rows, K]
  // by [K, N], with the weight laid out either way, which is an output or the gradient of an input;
  // and the gradient of a weight, of which it copies both factors first.
  int64_t outputs = kNever, weights = kNever;
  // The most rows that the core library multiplies, of each dtype; none of float64.
  int64_t f32_rows = 0, bf16_rows = 0, f16_rows = 0;
};

// What was measured on this CPU (who_multiplies.cpp), never a measurement at run time, so that the
// same program has the same bits whenever it runs on the same CPU.
const WhoMultiplies& who_multiplies();

}  // namespace qkv::ops
