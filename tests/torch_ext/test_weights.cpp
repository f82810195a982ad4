// qkv::attention_weights and its sums against the formula.
#include "common.h"

namespace qkv::test {
namespace {

constexpr double kTolerance = 1e-12;

using Case = ShapedCall;  // without a value

std::vector<Case> cases() {
  const auto options = [] { return AttentionOptions(); };
  const at::Tensor some = at::tensor({1, 0, 1, 1, 0, 1, 1}).to(at::kBool);
  return {
      {"plain", {2, 3, 5, 8}, {2, 3, 7, 8}, {}, options()},
      {"two_dimensions", {5, 8}, {7, 8}, {}, options()},
      {"five_dimensions",
       {2, 1, 3, 5, 8},
       {4, 1, 7, 8},
       {},
       options().attn_mask(randn({4, 1, 5, 7}))},
      {"bool_mask", {2, 3, 5, 8}, {2, 3, 7, 8}, {}, options().attn_mask(some).is_causal(true)},
      {"keys_mask", {2, 3, 5, 8}, {2, 3, 7, 8}, {}, options().attn_mask(randn({3, 1, 7}))},
      {"everything", {2, 6, 5, 8}, {2, 2, 7, 8}, {}, everything()},
  };
}

class Weights : public testing::TestWithParam<Case> {
 protected:
  const Case& c = GetParam();
  at::Tensor query = randn(c.query), key = randn(c.key);
  at::Tensor expected = reference_weights(query, key, c.options);

  void expect_weights(const at::Tensor& actual, const at::Tensor& truth) {
    expect_close(actual, truth, kTolerance);
    const auto inputs = leaves({query, key}, c.options);
    const auto gradients = [&](const at::Tensor& weights) {
      return torch::autograd::grad({weights.sin().sum()}, inputs, {}, /*retain_graph=*/true);
    };
    expect_close(gradients(actual), gradients(truth), kTolerance);
  }
};

TEST_P(Weights, FollowTheFormula) {
  expect_weights(attention_weights(query, key, c.options), expected);
}

TEST_P(Weights, MeanOverHeads) {
  expect_weights(attention_weights(query, key, c.options, "heads"),
                 expected.dim() > 2 ? expected.mean(-3) : expected);
}

TEST_P(Weights, SumOverQueries) {
  expect_weights(attention_weights(query, key, c.options, "queries"), expected.sum(-2));
}

TEST_P(Weights, BesideTheOutput) {
  const auto value = randn(c.key);
  for (const double p : {0.0, 0.4}) {
    const auto options = AttentionOptions(c.options).dropout_p(p);
    const auto seeded = [&](const auto& f) {
      torch::manual_seed(5);
      return f();
    };
    for (const auto reduce : {std::optional<std::string_view>(), {"heads"}, {"queries"}}) {
      const auto [output, weights] =
          seeded([&] { return attention_with_weights(query, key, value, options, reduce); });
      const auto inputs = leaves({query, key, value}, c.options);
      const auto alone = seeded([&] { return attention(query, key, value, options); });
      const auto its = seeded([&] { return attention_weights(query, key, options, reduce); });
      expect_close(output, alone, kTolerance);
      expect_close(weights, its, kTolerance);
      const auto gradients = [&](const at::Tensor& loss) {
        return torch::autograd::grad({loss}, inputs, {}, /*retain_graph=*/true);
      };
      expect_close(gradients(output.sin().sum() + weights.cos().sum()),
                   gradients(alone.sin().sum() + its.cos().sum()), kTolerance);
    }
  }
}

TEST_P(Weights, TimesValueIsAttention) {
  if (c.options.enable_gqa()) return;
  const auto value = randn(c.key);
  for (const double p : {0.0, 0.4}) {
    const auto options = AttentionOptions(c.options).dropout_p(p);
    torch::manual_seed(5);
    const auto weights = attention_weights(query, key, options);
    torch::manual_seed(5);
    expect_close(at::matmul(weights, value), attention(query, key, value, options), kTolerance);
  }
}

INSTANTIATE_TEST_SUITE_P(Cases, Weights, testing::ValuesIn(cases()),
                         [](const auto& info) { return info.param.name; });

TEST(AttentionWeights, DroppedOnesHaveNoGradient) {
  const auto query = randn({2, 3, 5, 8}), key = randn({2, 3, 7, 8});
  const auto options = AttentionOptions().dropout_p(0.4);
  torch::manual_seed(2);
  const auto factor = attention_weights(query, key, options).detach().ne(0).to(at::kDouble) / 0.6;
  const auto truth = reference_weights(query, key) * factor;
  for (const auto reduce : {"", "heads", "queries"}) {
    torch::manual_seed(2);
    const bool all = !*reduce, heads = std::string(reduce) == "heads";
    const auto actual = attention_weights(
        query, key, options, all ? std::nullopt : std::optional<std::string_view>(reduce));
    const auto expected = all ? truth : heads ? truth.mean(-3) : truth.sum(-2);
    expect_close(torch::autograd::grad({actual.sin().sum()}, {query, key}),
                 torch::autograd::grad({expected.sin().sum()}, {query, key}, {}, true), kTolerance);
  }
}

TEST(AttentionWeights, EmptyTensors) {
  EXPECT_EQ(attention_weights(randn({2, 0, 8}), randn({2, 7, 8})).sizes(),
            at::IntArrayRef({2, 0, 7}));
  const auto key = randn({2, 7, 8});
  const auto sums = attention_weights(randn({2, 0, 8}), key, {}, "queries");
  EXPECT_TRUE(at::equal(sums, at::zeros({2, 7}, at::kDouble)));
  EXPECT_TRUE(torch::autograd::grad({sums.sum()}, {key})[0].eq(0).all().item<bool>());
  EXPECT_EQ(attention_weights(key, randn({2, 0, 8}), {}, "queries").sizes(),
            at::IntArrayRef({2, 0}));
}

}  // namespace
}  // namespace qkv::test
