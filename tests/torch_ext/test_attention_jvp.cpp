// qkv::attention_jvp by duality: along directions t, <g, J t> is <J^T g, t>, with J^T g from the
// gradients of the reference.
#include "common.h"

namespace qkv::test {
namespace {

constexpr double kTolerance = 1e-11;  // f64; sums of all elements

using Case = ShapedCall;

std::vector<Case> cases() {
  const auto options = [] { return AttentionOptions(); };
  return {
      {"plain", {2, 3, 5, 8}, {2, 3, 7, 8}, {2, 3, 7, 4}, options()},
      {"two_dimensions", {5, 8}, {7, 8}, {7, 4}, options().is_causal(true)},
      {"broadcast", {2, 1, 3, 5, 8}, {2, 1, 7, 8}, {7, 4}, options().scale(-0.7)},
      {"masks",
       {2, 3, 5, 8},
       {2, 3, 7, 8},
       {2, 3, 7, 8},
       options().attn_mask(randn({5, 7})).bias(randn({3, 1, 7}))},
      {"everything",
       {2, 6, 5, 8},
       {2, 2, 7, 8},
       {2, 3, 7, 4},
       everything().bias(randn({2, 1, 1, 7}))},
  };
}

class AttentionJvp : public testing::TestWithParam<Case> {
 protected:
  const Case& c = GetParam();
  const at::Tensor query = randn(c.query), key = randn(c.key), value = randn(c.value);
  AttentionTangents tangents;
  std::vector<at::Tensor> moving, directions;  // the tensors that have tangents, and these

  void SetUp() override {
    const auto move = [&](const std::optional<at::Tensor>& tensor) {
      if (!tensor) return std::optional<at::Tensor>();
      moving.push_back(*tensor);
      directions.push_back(at::randn_like(*tensor));
      return std::optional(directions.back());
    };
    tangents.query(move(query)).key(move(key)).value(move(value));
    tangents.attn_mask(move(c.options.attn_mask())).bias(move(c.options.bias()));
    tangents.alibi_slopes(move(c.options.alibi_slopes())).sinks(move(c.options.sinks()));
  }

  // The derivative of output * grad_output + lse * grad_lse along the directions.
  void expect_dual(const std::array<at::Tensor, 2>& found,
                   const std::tuple<at::Tensor, at::Tensor>& results) {
    const auto& [output, lse] = results;
    const std::vector<at::Tensor> seeds = {at::randn_like(output), at::randn_like(lse)};
    const auto gradients = torch::autograd::grad({output, lse}, moving, seeds);
    at::Tensor expected = at::zeros({}, at::kDouble);
    for (size_t i = 0; i < moving.size(); ++i) expected += (gradients[i] * directions[i]).sum();
    expect_close((found[0] * seeds[0]).sum() + (found[1] * seeds[1]).sum(), expected, kTolerance);
  }
};

TEST_P(AttentionJvp, IsTheDualOfTheGradients) {
  const auto [output, lse, output_tangent, lse_tangent] =
      attention_jvp(query, key, value, tangents, c.options);
  const auto results = reference(query, key, value, c.options);
  expect_close(output, std::get<0>(results), kTolerance);
  expect_close(lse, std::get<1>(results), kTolerance);
  EXPECT_EQ(output_tangent.strides(), output.strides());
  expect_dual({output_tangent, lse_tangent}, results);
}

TEST_P(AttentionJvp, KeepsWhatAttentionKeeps) {
  const auto options = AttentionOptions(c.options).dropout_p(0.4);
  torch::manual_seed(5);
  const auto [output, lse, output_tangent, lse_tangent] =
      attention_jvp(query, key, value, tangents, options);
  torch::manual_seed(5);
  const auto results = attention_with_lse(query, key, value, options);
  expect_close(output, std::get<0>(results), kTolerance);
  expect_dual({output_tangent, lse_tangent}, results);
}

TEST_P(AttentionJvp, WithoutTangentsNothingChanges) {
  const auto [output, lse, output_tangent, lse_tangent] =
      attention_jvp(query, key, value, {}, c.options);
  expect_close(output, attention(query, key, value, c.options), kTolerance);
  EXPECT_TRUE(output_tangent.eq(0).all().item<bool>());
  EXPECT_TRUE(lse_tangent.eq(0).all().item<bool>());
}

INSTANTIATE_TEST_SUITE_P(Cases, AttentionJvp, testing::ValuesIn(cases()),
                         [](const auto& info) { return info.param.name; });

TEST(AttentionJvpApi, IsDifferentiable) {
  const auto query = randn({2, 3, 5, 8}), key = randn({2, 3, 7, 8}), value = randn({2, 3, 7, 8});
  const auto direction = randn({2, 3, 5, 8});
  const auto tangent =
      std::get<2>(attention_jvp(query, key, value, AttentionTangents().query(direction)));
  // It is linear in the direction.
  const auto gradient = torch::autograd::grad({tangent.pow(2).sum()}, {direction})[0];
  expect_close((gradient * direction).sum(), 2 * tangent.pow(2).sum(), kTolerance);
}

TEST(AttentionJvpApi, Errors) {
  const auto query = randn({2, 3, 5, 8}), key = randn({2, 3, 7, 8});
  const auto message = [&](const AttentionTangents& tangents) {
    return message_of([&] { attention_jvp(query, key, key, tangents); });
  };
  EXPECT_EQ(message(AttentionTangents().key(query)),
            "attention_jvp: key_tangent has the shape [2, 3, 5, 8], but [2, 3, 7, 8] is expected");
  EXPECT_EQ(message(AttentionTangents().query(query.to(at::kFloat))),
            "attention_jvp: query_tangent is float32, but float64 is expected");
  EXPECT_EQ(message(AttentionTangents().bias(query)),
            "attention_jvp: bias_tangent is given, but bias is None");
  EXPECT_EQ(message_of([&] { attention_jvp({}, key, key, {}); }),
            "attention_jvp: query is an undefined tensor");
}

}  // namespace
}  // namespace qkv::test
