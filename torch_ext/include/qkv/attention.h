// Attention for LibTorch programs, with gradients; no Python needed.
//
//   auto output = qkv::attention(query, key, value, qkv::AttentionOptions().is_causal(true));
//
// Link qkv::qkv from find_package(qkv); `python -c "import qkv; print(qkv.cmake_prefix_path)"`
// says where CMake finds it.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/api/include/torch/arg.h>

#include <optional>
#include <tuple>

#include "qkv/export.h"

namespace qkv {

// What scaled_dot_product_attention takes beside query, key and value, with its defaults.
struct AttentionOptions {
  // Broadcastable to [..., H, L, S]. bool: true = may attend. float32, or the
  // query's dtype: added to the scores. May not require grad yet.
  TORCH_ARG(std::optional<at::Tensor>, attn_mask) = std::nullopt;
  // Only 0 is implemented yet.
  TORCH_ARG(double, dropout_p) = 0.0;
  // Query i sees keys j <= i, as well as what attn_mask says.
  TORCH_ARG(bool, is_causal) = false;
  // Multiplies the scores; finite. 1 / sqrt(D) when not set.
  TORCH_ARG(std::optional<double>, scale) = std::nullopt;
  // Key and value may have fewer heads than query; their head counts divide H.
  TORCH_ARG(bool, enable_gqa) = false;
};

// softmax(scale * query @ key^T + mask) @ value.
//
//   query [..., H, L, D], key [..., H, S, D], value [..., H, S, Dv] -> [..., H, L, Dv]
//
// float32 or float64, all the same, on the CPU. At least two dimensions; the
// leading ones broadcast. Any strides; nothing is copied. The output is laid
// out in memory like query. A row with nothing to attend to is 0. Differentiable once with
// respect to query, key and value. Throws c10::Error (c10::ValueError for scale
// and dropout_p, c10::NotImplementedError for what is still to come), naming
// the argument. Tensors on another device go to torch's own attention.
QKV_API at::Tensor attention(const at::Tensor& query, const at::Tensor& key,
                             const at::Tensor& value, const AttentionOptions& options = {});

// attention and, as the second result, the natural logarithm of each row's
// softmax denominator: [..., H, L], contiguous, in query's dtype, -inf for a row
// with nothing to attend to. Both are differentiable. CPU only.
QKV_API std::tuple<at::Tensor, at::Tensor> attention_with_lse(const at::Tensor& query,
                                                              const at::Tensor& key,
                                                              const at::Tensor& value,
                                                              const AttentionOptions& options = {});

}  // namespace qkv
