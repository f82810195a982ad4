// Products of few rows by the core library (row_product.h), which reads a matrix from memory faster
// than torch's libraries do.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

namespace qkv::ops {

// Whether few_rows() multiplies these plain tensors of one dtype: input [..., K] and matrix [N, K],
// or input [B, M, K] and matrix [B, N, K].
bool are_few_rows(const at::Tensor& input, const at::Tensor& matrix);

// input times the transposed matrix, plus bias [N]: [..., N] or [B, M, N]. No derivative is made.
at::Tensor few_rows(const at::Tensor& input, const at::Tensor& matrix,
                    const std::optional<at::Tensor>& bias);

}  // namespace qkv::ops
