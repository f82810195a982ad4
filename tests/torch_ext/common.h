// The formula of attention, and helpers that the tests of the LibTorch API share.
#pragma once

#include <gtest/gtest.h>
#include <torch/torch.h>

#include "qkv/attention.h"

namespace qkv::test {

inline at::Tensor randn(at::IntArrayRef shape, at::ScalarType dtype = at::kDouble) {
  return torch::randn(shape, at::TensorOptions(dtype)).requires_grad_();
}

// bool [L, S]: the keys that each query may see.
inline at::Tensor visible(int64_t L, int64_t S, const AttentionOptions& options) {
  const auto i = at::arange(L).unsqueeze(1), j = at::arange(S);
  at::Tensor keep = at::ones({L, S}, at::kBool);
  if (options.is_causal()) keep = keep.logical_and(j <= i);
  if (!options.window_size()) return keep;
  const auto [left, right] = *options.window_size();
  if (left >= 0) keep = keep.logical_and(j >= i + (S - L - left));
  if (right >= 0) keep = keep.logical_and(j <= i + (S - L + right));
  return keep;
}

// [L, S]: how far each key is from each query, where the last key stands at the last query.
inline at::Tensor distance(int64_t L, int64_t S) {
  return (at::arange(L).unsqueeze(1) + (S - L) - at::arange(S)).abs();
}

// The scores [..., H, L, S], in query's dtype; -inf where a query does not see the key.
inline at::Tensor scores_of(const at::Tensor& query, const at::Tensor& key,
                            const AttentionOptions& options) {
  const int64_t L = query.size(-2), S = key.size(-2);
  const double scale = options.scale().value_or(1 / std::sqrt(double(query.size(-1))));
  at::Tensor scores = at::matmul(query, key.mT()) * scale;
  if (options.softcap() > 0) scores = (scores / options.softcap()).tanh() * options.softcap();
  if (const auto& slopes = options.alibi_slopes())
    scores = scores - slopes->to(scores.scalar_type()).unsqueeze(-1).unsqueeze(-1) * distance(L, S);
  at::Tensor keep = visible(L, S, options);
  if (const auto& mask = options.attn_mask()) {
    if (mask->scalar_type() == at::kBool) {
      keep = keep.logical_and(*mask);
    } else {
      scores = scores + *mask;
    }
  }
  return scores.masked_fill(keep.logical_not(), -std::numeric_limits<double>::infinity());
}

// Weights [..., H, L, S] and logsumexp by the formula, without dropout. Every query sees a key.
inline std::tuple<at::Tensor, at::Tensor> reference_weights(const at::Tensor& query, at::Tensor key,
                                                            const AttentionOptions& options = {}) {
  if (options.enable_gqa()) key = key.repeat_interleave(query.size(-3) / key.size(-3), -3);
  const at::Tensor scores = scores_of(query, key, options);
  at::Tensor lse = scores.logsumexp(-1);
  if (const auto& sinks = options.sinks())
    lse = lse.logaddexp(sinks->to(lse.scalar_type()).unsqueeze(-1));
  return {(scores - lse.unsqueeze(-1)).exp(), lse};
}

// Output and logsumexp by the formula, in query's dtype, by way of all weights [..., H, L, S].
inline std::tuple<at::Tensor, at::Tensor> reference(at::Tensor query, at::Tensor key,
                                                    at::Tensor value,
                                                    const AttentionOptions& options = {}) {
  const auto [weights, lse] = reference_weights(query, key, options);
  if (options.enable_gqa()) value = value.repeat_interleave(query.size(-3) / value.size(-3), -3);
  return {at::matmul(weights, value), lse};
}

// The tensors of a call that want a gradient.
inline std::vector<at::Tensor> leaves(std::vector<at::Tensor> tensors,
                                      const AttentionOptions& options) {
  for (const auto& tensor : {options.attn_mask(), options.alibi_slopes(), options.sinks()})
    if (tensor && tensor->requires_grad()) tensors.push_back(*tensor);
  return tensors;
}

inline void expect_close(const at::Tensor& actual, const at::Tensor& expected, double tolerance) {
  ASSERT_EQ(actual.sizes(), expected.sizes());
  ASSERT_EQ(actual.scalar_type(), expected.scalar_type());
  EXPECT_TRUE(at::allclose(actual, expected, tolerance, tolerance))
      << "largest difference " << (actual - expected).abs().max().item<double>();
}

inline void expect_close(const std::vector<at::Tensor>& actual,
                         const std::vector<at::Tensor>& expected, double tolerance) {
  ASSERT_EQ(actual.size(), expected.size());
  for (size_t i = 0; i < actual.size(); ++i) {
    SCOPED_TRACE(i);
    expect_close(actual[i], expected[i], tolerance);
  }
}

// The text of the error that `call` throws, of the type `Error`.
template <class Error = c10::Error, class Call>
std::string message_of(const Call& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.what_without_backtrace();
  }
  return "(no error)";
}

}  // namespace qkv::test
