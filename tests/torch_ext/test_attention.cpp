// qkv::attention and its options against the formula and torch's own attention.
#include "common.h"

namespace qkv::test::attention_tests {
namespace {

constexpr double kTolerance = 1e-12;  // f64

using Case = ShapedCall;

Case plain(const std::string& name, const AttentionOptions& options) {
  return {name, {2, 3, 5, 8}, {2, 3, 7, 8}, {2, 3, 7, 8}, options};
}

std::vector<Case> cases() {
  const auto options = [] { return AttentionOptions(); };
  const at::Tensor some = at::tensor({1, 0, 1, 1, 0, 1, 1}).to(at::kBool);
  const at::Tensor bias = at::arange(35, at::kDouble).sin().view({5, 7});
  return {
      {"plain", {2, 3, 5, 8}, {2, 3, 7, 8}, {2, 3, 7, 8}, options()},
      {"value_of_its_own_width", {2, 3, 5, 8}, {2, 3, 7, 8}, {2, 3, 7, 4}, options()},
      {"two_dimensions", {5, 8}, {7, 8}, {7, 4}, options()},
      {"five_dimensions", {2, 1, 3, 5, 8}, {2, 2, 3, 7, 8}, {1, 2, 3, 7, 4}, options()},
      {"broadcast_heads", {2, 3, 5, 8}, {2, 1, 7, 8}, {7, 4}, options()},
      {"causal", {2, 3, 5, 8}, {2, 3, 7, 8}, {2, 3, 7, 8}, options().is_causal(true)},
      {"scale", {2, 3, 5, 8}, {2, 3, 7, 8}, {2, 3, 7, 8}, options().scale(-0.7)},
      {"gqa", {2, 6, 5, 8}, {2, 2, 7, 8}, {2, 2, 7, 8}, options().enable_gqa(true)},
      {"gqa_unequal", {2, 6, 5, 8}, {2, 2, 7, 8}, {2, 3, 7, 8}, options().enable_gqa(true)},
      {"bool_mask", {2, 3, 5, 8}, {2, 3, 7, 8}, {2, 3, 7, 8}, options().attn_mask(some)},
      {"f64_mask", {2, 3, 5, 8}, {2, 3, 7, 8}, {2, 3, 7, 8}, options().attn_mask(bias)},
      {"f32_mask",
       {2, 3, 5, 8},
       {2, 3, 7, 8},
       {2, 3, 7, 8},
       options().attn_mask(bias.to(at::kFloat))},
      {"mask_and_causal",
       {2, 3, 5, 8},
       {2, 3, 7, 8},
       {2, 3, 7, 8},
       options().attn_mask(some).is_causal(true)},
      plain("window", options().window_size({{3, 1}})),
      plain("window_left", options().window_size({{2, -1}})),
      plain("window_and_causal", options().window_size({{4, 2}}).is_causal(true)),
      plain("window_wider_than_all", options().window_size({{int64_t(1) << 62, 0}})),
      plain("softcap", options().softcap(0.7)),
      plain("alibi", options().alibi_slopes(randn({3}))),
      plain("alibi_by_batch", options().alibi_slopes(randn({2, 3}))),
      plain("alibi_f32", options().alibi_slopes(at::arange(3, at::kFloat))),
      plain("spans", options().spans(at::tensor({0, 2, 3, 5}, at::kInt).expand({3, 5, 4}))),
      plain("sinks", options().sinks(randn({3}))),
      plain("sinks_by_batch", options().sinks(randn({2, 1}))),
      plain("mask_of_rows_and_keys", options().attn_mask(randn({5, 7}))),
      plain("mask_of_heads", options().attn_mask(randn({3, 1, 7}))),
      plain("mask_of_batch", options().attn_mask(randn({2, 1, 5, 7}))),
      plain("mask_of_everything", options().attn_mask(randn({2, 3, 5, 7}))),
      plain("mask_of_rows", options().attn_mask(randn({5, 1}))),
      plain("mask_of_keys", options().attn_mask(randn({7}))),
      plain("mask_number", options().attn_mask(randn({}))),
      plain("mask_expanded", options().attn_mask(randn({5, 7}).expand({2, 3, 5, 7}))),
      {"everything", {2, 6, 5, 8}, {2, 2, 7, 8}, {2, 3, 7, 4}, everything()},
  };
}

class Attention : public testing::TestWithParam<Case> {};

TEST_P(Attention, OutputAndLogsumexpFollowTheFormula) {
  const Case& c = GetParam();
  const auto query = randn(c.query), key = randn(c.key), value = randn(c.value);
  const auto [output, lse] = attention_with_lse(query, key, value, c.options);
  const auto [expected, expected_lse] = reference(query, key, value, c.options);
  expect_close(output, expected, kTolerance);
  expect_close(lse, expected_lse, kTolerance);
  EXPECT_TRUE(at::equal(output, attention(query, key, value, c.options)));
}

TEST_P(Attention, GradientsFollowTheFormula) {
  const Case& c = GetParam();
  const auto query = randn(c.query), key = randn(c.key), value = randn(c.value);
  const auto gradients = [&](const std::tuple<at::Tensor, at::Tensor>& result) {
    const auto& [output, lse] = result;
    return torch::autograd::grad({output.sin().sum() + lse.cos().sum()},
                                 leaves({query, key, value}, c.options));
  };
  expect_close(gradients(attention_with_lse(query, key, value, c.options)),
               gradients(reference(query, key, value, c.options)), kTolerance);
}

INSTANTIATE_TEST_SUITE_P(Cases, Attention, testing::ValuesIn(cases()),
                         [](const auto& info) { return info.param.name; });

TEST(AttentionApi, DefaultsAreThoseOfTorch) {
  for (const auto dtype : {at::kFloat, at::kDouble}) {
    const auto query = randn({2, 3, 33, 16}, dtype);
    const auto key = randn({2, 3, 40, 16}, dtype), value = randn({2, 3, 40, 16}, dtype);
    expect_close(attention(query, key, value), at::scaled_dot_product_attention(query, key, value),
                 dtype == at::kFloat ? 1e-5 : kTolerance);
  }
}

TEST(AttentionApi, OptionsReadBack) {
  const at::Tensor mask = at::ones({2}, at::kBool);
  const at::Tensor slopes = at::ones({2}), sinks = at::zeros({2});
  const auto options = AttentionOptions()
                           .attn_mask(mask)
                           .dropout_p(0.5)
                           .is_causal(true)
                           .scale(2)
                           .enable_gqa(true)
                           .window_size({{3, -1}})
                           .softcap(30)
                           .alibi_slopes(slopes)
                           .sinks(sinks);
  EXPECT_TRUE(options.attn_mask()->is_same(mask));
  EXPECT_EQ(options.dropout_p(), 0.5);
  EXPECT_TRUE(options.is_causal());
  EXPECT_EQ(options.scale(), 2);
  EXPECT_TRUE(options.enable_gqa());
  EXPECT_EQ(*options.window_size(), (AttentionOptions::Window{3, -1}));
  EXPECT_EQ(options.softcap(), 30);
  EXPECT_TRUE(options.alibi_slopes()->is_same(slopes));
  EXPECT_TRUE(options.sinks()->is_same(sinks));
}

TEST(AttentionApi, MaskGradientHasTheMasksTypeAndLayout) {
  const auto query = randn({2, 3, 5, 8}, at::kDouble), key = randn({2, 3, 7, 8});
  const auto expected_mask = randn({7, 5}, at::kFloat);
  const auto mask = expected_mask.detach().t().requires_grad_();
  const auto output = attention(query, key, key, AttentionOptions().attn_mask(mask));
  const auto gradient = torch::autograd::grad({output.sin().sum()}, {mask})[0];
  EXPECT_EQ(gradient.scalar_type(), at::kFloat);
  EXPECT_EQ(gradient.strides(), mask.strides());
  const auto wide = mask.detach().to(at::kDouble).requires_grad_();
  const auto [truth, _] = reference(query, key, key, AttentionOptions().attn_mask(wide));
  expect_close(gradient.to(at::kDouble), torch::autograd::grad({truth.sin().sum()}, {wide})[0],
               1e-6);
}

TEST(AttentionApi, SinkAloneIsTheLogsumexp) {
  const auto query = randn({2, 3, 5, 8}), none = randn({2, 3, 0, 8}), sinks = randn({3});
  const auto [output, lse] = attention_with_lse(query, none, none, AttentionOptions().sinks(sinks));
  EXPECT_TRUE(output.eq(0).all().item<bool>());
  expect_close(lse, sinks.unsqueeze(-1).expand_as(lse), kTolerance);
  expect_close(torch::autograd::grad({lse.sum()}, {sinks})[0], at::full({3}, 10, at::kDouble),
               kTolerance);
}

TEST(AttentionApi, RowWithNothingToAttendToIsZero) {
  const auto query = randn({5, 8}), key = randn({7, 8}), value = randn({7, 8});
  at::Tensor mask = at::ones({5, 7}, at::kBool);
  mask[2].zero_();
  const auto [output, lse] =
      attention_with_lse(query, key, value, AttentionOptions().attn_mask(mask));
  EXPECT_TRUE(output[2].eq(0).all().item<bool>());
  EXPECT_EQ(lse[2].item<double>(), -std::numeric_limits<double>::infinity());
  const auto gradient = torch::autograd::grad({output.sum()}, {query})[0];
  EXPECT_TRUE(gradient[2].eq(0).all().item<bool>());
  EXPECT_TRUE(gradient.isfinite().all().item<bool>());
}

TEST(AttentionApi, EmptyTensors) {
  EXPECT_EQ(attention(randn({2, 0, 8}), randn({2, 7, 8}), randn({2, 7, 8})).sizes(),
            at::IntArrayRef({2, 0, 8}));
  EXPECT_EQ(attention(randn({0, 5, 8}), randn({0, 7, 8}), randn({0, 7, 8})).sizes(),
            at::IntArrayRef({0, 5, 8}));
  const auto query = randn({2, 5, 8});
  const auto [output, lse] = attention_with_lse(query, randn({2, 0, 8}), randn({2, 0, 8}));
  EXPECT_TRUE(output.eq(0).all().item<bool>());
  EXPECT_TRUE(lse.isinf().all().item<bool>());
  EXPECT_TRUE(torch::autograd::grad({output.sum()}, {query})[0].eq(0).all().item<bool>());
}

}  // namespace
}  // namespace qkv::test::attention_tests
