// The operators of schema.cpp as C++ functions. The dispatcher passes every
// option by itself; everything else here sees one AttentionOptions. A new option is
// added to schema.cpp, to AttentionOptions, and to ops.cpp and the adapters below.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/DispatchKeySet.h>

#include <array>
#include <optional>
#include <tuple>

#include "qkv/attention.h"

namespace qkv {

using OptionalTensor = std::optional<at::Tensor>;
using OutputAndLse = std::tuple<at::Tensor, at::Tensor>;
using Gradients = std::tuple<at::Tensor, at::Tensor, at::Tensor>;  // of query, key, value

// The arguments of attention and attention_with_lse, for the length of a call.
struct Forward {
  const at::Tensor& query;
  const at::Tensor& key;
  const at::Tensor& value;
  AttentionOptions options;
};

// The arguments of attention_backward, for the length of a call.
struct Backward {
  const OptionalTensor& grad_output;
  const OptionalTensor& grad_lse;
  Forward forward;
  const at::Tensor& output;
  const at::Tensor& lse;
  std::array<bool, 3> output_mask;  // which gradients are wanted
};

namespace ops {

at::Tensor attention(const Forward& call);
OutputAndLse attention_with_lse(const Forward& call);
Gradients attention_backward(const Backward& call);

// The same, with the kernel that comes next in `keys`.
OutputAndLse attention_with_lse(c10::DispatchKeySet keys, const Forward& call);
Gradients attention_backward(c10::DispatchKeySet keys, const Backward& call);

inline AttentionOptions options_of(const OptionalTensor& attn_mask, double dropout_p,
                                   bool is_causal, std::optional<double> scale, bool enable_gqa) {
  return AttentionOptions()
      .attn_mask(attn_mask)
      .dropout_p(dropout_p)
      .is_causal(is_causal)
      .scale(scale)
      .enable_gqa(enable_gqa);
}

// Adapters: forward<&kernel> is `kernel` with the dispatcher's signature;
// *_with_keys for kernels that redispatch.
template <auto kernel>
auto forward(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
             const OptionalTensor& attn_mask, double dropout_p, bool is_causal,
             std::optional<double> scale, bool enable_gqa) {
  return kernel(
      {query, key, value, options_of(attn_mask, dropout_p, is_causal, scale, enable_gqa)});
}

template <auto kernel>
OutputAndLse forward_with_keys(c10::DispatchKeySet keys, const at::Tensor& query,
                               const at::Tensor& key, const at::Tensor& value,
                               const OptionalTensor& attn_mask, double dropout_p, bool is_causal,
                               std::optional<double> scale, bool enable_gqa) {
  return kernel(
      keys, {query, key, value, options_of(attn_mask, dropout_p, is_causal, scale, enable_gqa)});
}

template <auto kernel>
Gradients backward(const OptionalTensor& grad_output, const OptionalTensor& grad_lse,
                   const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                   const OptionalTensor& attn_mask, const at::Tensor& output, const at::Tensor& lse,
                   double dropout_p, bool is_causal, std::optional<double> scale, bool enable_gqa,
                   std::array<bool, 3> output_mask) {
  return kernel(
      {grad_output,
       grad_lse,
       {query, key, value, options_of(attn_mask, dropout_p, is_causal, scale, enable_gqa)},
       output,
       lse,
       output_mask});
}

template <auto kernel>
Gradients backward_with_keys(c10::DispatchKeySet keys, const OptionalTensor& grad_output,
                             const OptionalTensor& grad_lse, const at::Tensor& query,
                             const at::Tensor& key, const at::Tensor& value,
                             const OptionalTensor& attn_mask, const at::Tensor& output,
                             const at::Tensor& lse, double dropout_p, bool is_causal,
                             std::optional<double> scale, bool enable_gqa,
                             std::array<bool, 3> output_mask) {
  return kernel(
      keys, {grad_output,
             grad_lse,
             {query, key, value, options_of(attn_mask, dropout_p, is_causal, scale, enable_gqa)},
             output,
             lse,
             output_mask});
}

}  // namespace ops
}  // namespace qkv
