// qkv::hard_attention against the reference.
#include "common.h"

namespace qkv::test {
namespace {

constexpr double kTolerance = 1e-12;

using Case = ShapedCall;

std::vector<Case> cases() {
  const auto options = [] { return AttentionOptions(); };
  return {
      {"plain", {2, 3, 5, 8}, {2, 3, 7, 8}, {2, 3, 7, 4}, options()},
      {"two_dimensions", {5, 8}, {7, 8}, {7, 4}, options()},
      {"broadcast", {2, 3, 5, 8}, {7, 8}, {2, 1, 7, 4}, options()},
      {"gqa_unequal", {2, 6, 5, 8}, {2, 2, 7, 8}, {2, 3, 7, 4}, options().enable_gqa(true)},
      {"everything",
       {2, 3, 5, 8},
       {2, 3, 7, 8},
       {2, 3, 7, 4},
       options()
           .attn_mask(randn({3, 5, 7}))
           .window_size({{4, 1}})
           .softcap(2)
           .alibi_slopes(randn({3}))
           .scale(-0.4)},
  };
}

class Hard : public testing::TestWithParam<Case> {
 protected:
  const Case& c = GetParam();
  at::Tensor query = randn(c.query), key = randn(c.key), value = randn(c.value);
};

TEST_P(Hard, ValueAtTheLargestScore) {
  const auto [output, index] = hard_attention(query, key, value, c.options);
  const auto [expected, expected_index] = reference_hard(query, key, value, c.options);
  ASSERT_TRUE(at::equal(index, expected_index));
  EXPECT_TRUE(at::equal(output, expected));
  expect_close(torch::autograd::grad({output.sin().sum()}, {value})[0],
               torch::autograd::grad({expected.sin().sum()}, {value})[0], kTolerance);
}

TEST_P(Hard, StraightThroughGradientsAreThoseOfAttention) {
  const auto [output, index] = hard_attention(query, key, value, c.options, true);
  const auto grad_output = at::randn_like(output);
  const auto inputs = leaves({query, key}, c.options);
  const auto soft = std::get<0>(reference(query, key, value, c.options));
  expect_close(torch::autograd::grad({output}, inputs, {grad_output}, true),
               torch::autograd::grad({soft}, inputs, {grad_output}), kTolerance);
  const auto hard = std::get<0>(hard_attention(query, key, value, c.options));
  EXPECT_TRUE(at::equal(torch::autograd::grad({output}, {value}, {grad_output})[0],
                        torch::autograd::grad({hard}, {value}, {grad_output})[0]));
}

INSTANTIATE_TEST_SUITE_P(Cases, Hard, testing::ValuesIn(cases()),
                         [](const auto& info) { return info.param.name; });

TEST(HardAttention, FirstOfEqualScores) {
  const auto query = at::zeros({3, 8}), key = at::randn({7, 8}), value = at::randn({7, 4});
  at::Tensor mask = at::ones({3, 7}, at::kBool);
  mask[1].slice(0, 0, 4).zero_();
  mask[2].zero_();
  const auto [output, index] =
      hard_attention(query, key, value, AttentionOptions().attn_mask(mask));
  EXPECT_TRUE(at::equal(index, at::tensor({0, 4, -1})));
  EXPECT_TRUE(at::equal(output[1], value[4]));
  EXPECT_TRUE(output[2].eq(0).all().item<bool>());
}

TEST(HardAttention, OnlyTheValueHasAGradient) {
  const auto query = randn({5, 8}), key = randn({7, 8}), value = at::randn({7, 4}, at::kDouble);
  const auto [output, index] = hard_attention(query, key, value);
  EXPECT_FALSE(output.requires_grad());
  EXPECT_FALSE(index.requires_grad());
}

TEST(HardAttention, NothingToAttendTo) {
  const auto query = randn({2, 5, 8}), none = randn({2, 0, 8});
  const auto [output, index] = hard_attention(query, none, none, {}, true);
  EXPECT_TRUE(output.eq(0).all().item<bool>());
  EXPECT_TRUE(index.eq(-1).all().item<bool>());
  const auto gradients = torch::autograd::grad({output.sum()}, {query, none});
  EXPECT_TRUE(gradients[0].eq(0).all().item<bool>());
  EXPECT_EQ(gradients[1].sizes(), none.sizes());
}

// An infinity in a value that was not chosen is in no result.
TEST(HardAttention, OtherValuesMayBeInfinite) {
  const auto query = randn({5, 8}), key = randn({7, 8});
  const auto index = std::get<1>(hard_attention(query, key, key));
  at::Tensor value = at::full({7, 4}, HUGE_VAL, at::kDouble);
  value.index_fill_(0, index.flatten(), 1);
  const auto output = std::get<0>(hard_attention(query, key, value.requires_grad_(), {}, true));
  EXPECT_TRUE(output.eq(1).all().item<bool>());
  EXPECT_TRUE(torch::autograd::grad({output.sum()}, {value})[0].isfinite().all().item<bool>());
}

}  // namespace
}  // namespace qkv::test
