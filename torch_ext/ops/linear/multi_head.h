// A layer of multi-head attention but for its checks: what qkv::nn::MultiheadAttention,
// qkv.nn.MultiheadAttention and the stand-in for torch's own operator (replace/) have in common.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <optional>
#include <tuple>

#include "qkv/options.h"

namespace qkv::ops {

using Inputs = std::array<at::Tensor, 3>;  // query, key and value

struct MultiHead {
  int64_t heads;
  // W_Q, W_K and W_V: the rows of one matrix [3 E, E], in this order, or three [E, width]. E is
  // heads * D. in_bias: [3 E].
  at::TensorList in_weights;
  std::optional<at::Tensor> in_bias;
  at::Tensor out_weight;  // W_O, [E, E]
  std::optional<at::Tensor> out_bias;

  // Inputs [..., width] to their heads [..., heads, rows, D], where `rows` is the inputs' dimension
  // of queries and keys. One matrix is multiplied once where all inputs are the same tensor, and
  // twice where key and value are; the results are views of that.
  Inputs project(const Inputs& inputs, int64_t rows) const;
  // Of heads: the output, laid out like the inputs, [..., E], and the weights, undefined without
  // need_weights: all of them, [..., heads, L, S], or with `average` their mean over the heads.
  std::tuple<at::Tensor, at::Tensor> attend(const Inputs& projected, int64_t rows,
                                            bool need_weights, bool average,
                                            const AttentionOptions& options) const;
  // Output [..., heads, L, D] to [..., E], laid out like the inputs.
  at::Tensor merge(const at::Tensor& output, int64_t rows) const;
};

}  // namespace qkv::ops
