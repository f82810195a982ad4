// The options that the functions of qkv/attention.h take.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/api/include/torch/arg.h>

#include <array>
#include <optional>
#include <string>

namespace qkv {

// What scaled_dot_product_attention takes beside query, key and value, with its defaults, and more.
// All of them combine. The score of query i and key j is made in this order: scale, softcap,
// score_program, ALiBi, the floating mask and bias; then is_causal, window_size, spans, -inf or a
// boolean mask hide keys.
//
// With L queries and S keys:
struct AttentionOptions {
  using Window = std::array<int64_t, 2>;  // {left, right}

  // Broadcastable to [..., H, L, S]. bool: true = may attend. float32, or the
  // query's dtype: added to the scores; differentiable, the gradient in the mask's dtype.
  TORCH_ARG(std::optional<at::Tensor>, attn_mask) = std::nullopt;
  // The probability of dropping a weight, 0 to 1; the others are divided by 1 - dropout_p. The
  // random numbers come from torch's default CPU generator: torch::manual_seed.
  TORCH_ARG(double, dropout_p) = 0.0;
  // Query i sees keys j <= i: top-left aligned.
  TORCH_ARG(bool, is_causal) = false;
  // Multiplies the scores; finite. 1 / sqrt(D) when not set.
  TORCH_ARG(std::optional<double>, scale) = std::nullopt;
  // Key and value may have fewer heads than query; their head counts divide H.
  TORCH_ARG(bool, enable_gqa) = false;
  // {left, right}: query i sees keys i + S - L - left <= j <= i + S - L + right, which is
  // bottom-right aligned; -1 leaves a side open.
  TORCH_ARG(std::optional<Window>, window_size) = std::nullopt;
  // c > 0: a score s becomes c * tanh(s / c). 0: it does not.
  TORCH_ARG(double, softcap) = 0.0;
  // float32, or the query's dtype, broadcastable to [..., H, L, S]: added to the scores beside
  // attn_mask; differentiable, the gradient in its own shape and dtype. For documents and caches:
  // see varlen_attention and attention_with_kvcache.
  TORCH_ARG(std::optional<at::Tensor>, bias) = std::nullopt;
  // int32, broadcastable to [..., H, L, 2 n], n from 1 to 256: query i sees only keys begin <= j <
  // end, for each begin and end of its row, which alternate: begin, end, begin, end ... 0 <= begin
  // <= end <= S; spans may overlap. Beside masks, is_causal and window_size: all of them hide. For
  // documents, by positions within them, [N, H, L, 2 n].
  TORCH_ARG(std::optional<at::Tensor>, spans) = std::nullopt;
  // Floating, broadcastable to [..., H]: slope * |i + S - L - j| is taken off the score.
  TORCH_ARG(std::optional<at::Tensor>, alibi_slopes) = std::nullopt;
  // Floating, broadcastable to [..., H]: the score of one more key, which every query of the head
  // sees and whose value is 0.
  TORCH_ARG(std::optional<at::Tensor>, sinks) = std::nullopt;
  // A function of your own that scores go through after softcap, as the text of a program
  // (docs/kernels.md); "": none. It reads the numbers of its tables from score_tables, which have a
  // gradient, float64 for a float64 query and float32 for all others, and from score_indices,
  // int32: both [N], or [R, N] with a row for each of R equal parts of the batch items.
  TORCH_ARG(std::string, score_program) = "";
  TORCH_ARG(std::optional<at::Tensor>, score_tables) = std::nullopt;
  TORCH_ARG(std::optional<at::Tensor>, score_indices) = std::nullopt;
};

// The directions in which the tensors of a call change, for attention_jvp: each of the shape and
// dtype of its tensor. One that is not set stands for zeros.
struct AttentionTangents {
  TORCH_ARG(std::optional<at::Tensor>, query) = std::nullopt;
  TORCH_ARG(std::optional<at::Tensor>, key) = std::nullopt;
  TORCH_ARG(std::optional<at::Tensor>, value) = std::nullopt;
  TORCH_ARG(std::optional<at::Tensor>, attn_mask) = std::nullopt;
  TORCH_ARG(std::optional<at::Tensor>, bias) = std::nullopt;
  TORCH_ARG(std::optional<at::Tensor>, alibi_slopes) = std::nullopt;
  TORCH_ARG(std::optional<at::Tensor>, sinks) = std::nullopt;
  TORCH_ARG(std::optional<at::Tensor>, score_tables) = std::nullopt;
};

}  // namespace qkv
