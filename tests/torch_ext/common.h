// What the tests of the LibTorch API share.
#pragma once

#include <gtest/gtest.h>
#include <torch/torch.h>

#include "qkv/attention.h"

namespace qkv::test {

inline at::Tensor randn(at::IntArrayRef shape, at::ScalarType dtype = at::kDouble) {
  return torch::randn(shape, at::TensorOptions(dtype)).requires_grad_();
}

// The formula, in query's dtype, by way of the whole [..., H, L, S] matrix.
inline std::tuple<at::Tensor, at::Tensor> reference(at::Tensor query, at::Tensor key,
                                                    at::Tensor value,
                                                    const AttentionOptions& options = {}) {
  if (options.enable_gqa()) {
    key = key.repeat_interleave(query.size(-3) / key.size(-3), -3);
    value = value.repeat_interleave(query.size(-3) / value.size(-3), -3);
  }
  const double scale = options.scale().value_or(1 / std::sqrt(double(query.size(-1))));
  at::Tensor scores = at::matmul(query, key.mT()) * scale;
  const double inf = std::numeric_limits<double>::infinity();
  if (options.is_causal()) {
    const auto keep = at::ones(scores.sizes(), scores.options().dtype(at::kBool)).tril();
    scores = scores.masked_fill(keep.logical_not(), -inf);
  }
  if (const auto& mask = options.attn_mask()) {
    scores = mask->scalar_type() == at::kBool ? scores.masked_fill(mask->logical_not(), -inf)
                                              : scores + *mask;
  }
  return {at::matmul(scores.softmax(-1), value), scores.logsumexp(-1)};
}

inline void expect_close(const at::Tensor& actual, const at::Tensor& expected, double tolerance) {
  ASSERT_EQ(actual.sizes(), expected.sizes());
  ASSERT_EQ(actual.scalar_type(), expected.scalar_type());
  EXPECT_TRUE(at::allclose(actual, expected, tolerance, tolerance))
      << "largest difference " << (actual - expected).abs().max().item<double>();
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
