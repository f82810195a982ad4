// By whom products are made, where torch's own choice was measured to be slower: by oneDNN, which
// torch has beside MKL, or, of few rows, by the core library (row_product.h), which reads a matrix
// from memory faster than torch's libraries do.
#pragma once

#include <ATen/core/Tensor.h>

#include <limits>
#include <optional>

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

// What was measured on this CPU (products.cpp), never a measurement at run time, so that the
// same program has the same bits whenever it runs on the same CPU.
const WhoMultiplies& who_multiplies();

// Whether few_rows() multiplies these plain tensors of one dtype: input [..., K] and matrix [N, K],
// or input [B, M, K] and matrix [B, N, K].
bool are_few_rows(const at::Tensor& input, const at::Tensor& matrix);

// input times the transposed matrix, plus bias [N]: [..., N] or [B, M, N]. No derivative is made.
at::Tensor few_rows(const at::Tensor& input, const at::Tensor& matrix,
                    const std::optional<at::Tensor>& bias);

}  // namespace qkv::ops
