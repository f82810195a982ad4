// Rotary position embedding of query and key, and the norm before it.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/api/include/torch/arg.h>

#include <optional>
#include <tuple>

#include "qkv/export.h"

namespace qkv {

struct RotateOptions {
  // [D] or [batch..., D], float32 or the query's dtype: x becomes
  // x * weight / sqrt(mean(x^2) + eps) over the head dimension first. Not set: it does not.
  TORCH_ARG(std::optional<at::Tensor>, query_weight) = std::nullopt;
  TORCH_ARG(std::optional<at::Tensor>, key_weight) = std::nullopt;
  // Not negative.
  TORCH_ARG(double, eps) = 1e-6;
  // Pair i is the numbers 2 i and 2 i + 1 of a head, instead of i and i + R / 2.
  TORCH_ARG(bool, interleaved) = false;
};

// Turns pair i of the first R numbers of each head, (a, b), to (a cos_i - b sin_i, b cos_i + a
// sin_i), and leaves the other D - R as they are.
//
//   query [..., H, L, D], key [..., Hkv, L, D] -> the same, with 3 to 11 dimensions
//   cos, sin [L, R / 2] or [batch..., L, R / 2], one number for each pair; R <= D
//
// Query and key are float32, float64, bfloat16 or float16, both the same, with the same leading
// dimensions, to which those of cos, sin and the weights broadcast. cos, sin and weights are of
// that dtype or float32. Any strides; nothing is copied, and the results are laid out in memory
// like query and key. Everything is computed in float32 (float64 for float64) and rounded once.
// Differentiable with respect to all tensors, any number of times and in forward mode; the first
// derivatives are a kernel. Autocast casts nothing. Throws c10::Error, naming the argument. CPU
// only.
QKV_API std::tuple<at::Tensor, at::Tensor> rotate(const at::Tensor& query, const at::Tensor& key,
                                                  const at::Tensor& cos, const at::Tensor& sin,
                                                  const RotateOptions& options = {});

}  // namespace qkv
