// The formula of attention, and helpers that the tests of the LibTorch API share.
#pragma once

#include <gtest/gtest.h>
#include <torch/autograd.h>
#include <torch/types.h>

#include "qkv/attention.h"
#include "reference.h"

namespace qkv::test {

inline at::Tensor randn(at::IntArrayRef shape, at::ScalarType dtype = at::kDouble) {
  return torch::randn(shape, at::TensorOptions(dtype)).requires_grad_();
}

// The tensors of a call that want a gradient.
inline std::vector<at::Tensor> leaves(std::vector<at::Tensor> tensors,
                                      const AttentionOptions& options) {
  for (const auto& tensor : {options.attn_mask(), options.alibi_slopes(), options.sinks()})
    if (tensor && tensor->requires_grad()) tensors.push_back(*tensor);
  return tensors;
}

// A call, by the shapes of its tensors.
struct ShapedCall {
  std::string name;
  std::vector<int64_t> query, key, value;
  AttentionOptions options;
};
inline std::ostream& operator<<(std::ostream& out, const ShapedCall& c) { return out << c.name; }

// All options that go together, for query [2, 6, 5, 8] and key [2, 2, 7, 8].
inline AttentionOptions everything() {
  return AttentionOptions()
      .enable_gqa(true)
      .attn_mask(randn({6, 5, 7}))
      .window_size({{5, 1}})
      .softcap(2)
      .alibi_slopes(randn({6}))
      .sinks(randn({2, 6}))
      .scale(0.4);
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
