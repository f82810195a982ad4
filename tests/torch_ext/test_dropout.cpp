// Dropout draws from torch's generator, and keeps the same weights forward and backward.
#include <ATen/CPUGeneratorImpl.h>

#include "common.h"

namespace qkv::test::dropout_tests {
namespace {

constexpr double kTolerance = 1e-12;

class Dropout : public testing::Test {
 protected:
  at::Tensor query = randn({2, 3, 20, 8}), key = randn({2, 3, 30, 8}), value = randn({2, 3, 30, 4});
  const AttentionOptions options = AttentionOptions().dropout_p(0.3).is_causal(true);

  // [..., H, L, S]: 1 / (1 - p) for the weights that are kept after torch::manual_seed(seed), else
  // 0.
  at::Tensor kept(int64_t seed) const {
    torch::manual_seed(seed);
    const auto weights = attention_weights(query, key, AttentionOptions().dropout_p(0.3));
    return weights.detach().ne(0).to(at::kDouble) / (1 - 0.3);
  }
};

TEST_F(Dropout, ManualSeedReproducesIt) {
  const auto with_seed = [&](int64_t seed) {
    torch::manual_seed(seed);
    return attention(query, key, value, options);
  };
  const auto output = with_seed(1);
  EXPECT_FALSE(at::equal(attention(query, key, value, options), output));  // the next draw
  EXPECT_FALSE(at::equal(with_seed(2), output));
  EXPECT_TRUE(at::equal(with_seed(1), output));
}

TEST_F(Dropout, DrawsOnlyIfThereIsDropout) {
  torch::manual_seed(1);
  const auto next = at::rand({1});
  torch::manual_seed(1);
  attention(query, key, value);
  EXPECT_TRUE(at::equal(at::rand({1}), next));
  torch::manual_seed(1);
  attention(query, key, value, options);
  EXPECT_FALSE(at::equal(at::rand({1}), next));
}

TEST_F(Dropout, ForwardAndBackwardDropTheSameWeights) {
  const at::Tensor factor = kept(7);
  torch::manual_seed(7);
  const auto [output, lse] = attention_with_lse(query, key, value, options);
  const auto expected_lse = std::get<1>(reference(query, key, value, options));
  const auto expected = at::matmul(reference_weights(query, key, options) * factor, value);
  expect_close(output, expected, kTolerance);
  expect_close(lse, expected_lse, kTolerance);
  expect_close(
      torch::autograd::grad({output.sin().sum() + lse.sin().sum()}, {query, key, value}),
      torch::autograd::grad({expected.sin().sum() + expected_lse.sin().sum()}, {query, key, value}),
      kTolerance);
}

TEST_F(Dropout, KeepsOneMinusPOfTheWeights) {
  const auto q = at::randn({4, 8, 128, 8}), k = at::randn({4, 8, 256, 8});
  const auto weights = attention_weights(q, k, AttentionOptions().dropout_p(0.3));
  const double n = double(weights.numel()),
               fraction = double(weights.ne(0).sum().item<int64_t>()) / n;
  EXPECT_NEAR(fraction, 0.7, 5 * std::sqrt(0.7 * 0.3 / n));  // five standard deviations
}

TEST_F(Dropout, OfEverythingIsZero) {
  const auto [output, lse] = attention_with_lse(query, key, value, AttentionOptions().dropout_p(1));
  EXPECT_TRUE(output.eq(0).all().item<bool>());
  expect_close(lse, std::get<1>(reference(query, key, value)), kTolerance);
  for (const auto& gradient : torch::autograd::grad({output.sum()}, {query, key, value}))
    EXPECT_TRUE(gradient.eq(0).all().item<bool>());
}

}  // namespace
}  // namespace qkv::test::dropout_tests
