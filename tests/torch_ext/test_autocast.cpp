// torch::autocast on the CPU covers the operators as it covers scaled_dot_product_attention.
#include <ATen/OpMathType.h>
#include <ATen/autocast_mode.h>

#include <functional>

#include "common.h"

namespace qkv::test::autocast_tests {
namespace {

// While it lives, the thread is in the state of Python's `with torch.autocast("cpu", dtype)`.
class Autocast {
 public:
  explicit Autocast(at::ScalarType dtype, bool enabled = true) {
    at::autocast::set_autocast_enabled(at::kCPU, enabled);
    at::autocast::set_autocast_dtype(at::kCPU, dtype);
    at::autocast::increment_nesting();
  }
  ~Autocast() {
    if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
    at::autocast::set_autocast_enabled(at::kCPU, was_enabled_);
    at::autocast::set_autocast_dtype(at::kCPU, dtype_);
  }
  Autocast(const Autocast&) = delete;

 private:
  const bool was_enabled_ = at::autocast::is_autocast_enabled(at::kCPU);
  const at::ScalarType dtype_ = at::autocast::get_autocast_dtype(at::kCPU);
};

using Tensors = std::vector<at::Tensor>;  // query, key, value, attn_mask, alibi_slopes, sinks

struct Operator {
  std::string name;
  std::function<at::Tensor(const Tensors&)> run;
};

std::ostream& operator<<(std::ostream& out, const Operator& op) { return out << op.name; }

AttentionOptions options_of(const Tensors& x) {
  return AttentionOptions().attn_mask(x[3]).alibi_slopes(x[4]).sinks(x[5]);
}

std::vector<Operator> operators() {
  return {
      {"attention", [](const Tensors& x) { return attention(x[0], x[1], x[2], options_of(x)); }},
      {"attention_with_lse",
       [](const Tensors& x) {
         const auto [output, lse] = attention_with_lse(x[0], x[1], x[2], options_of(x));
         EXPECT_EQ(lse.scalar_type(), at::toOpMathType(output.scalar_type()));
         return output;
       }},
      {"varlen_attention",
       [](const Tensors& x) {
         const auto rows = [](const at::Tensor& t) { return t[0].transpose(0, 1); };
         const auto options = AttentionOptions().alibi_slopes(x[4]).sinks(x[5]);
         return std::get<0>(varlen_attention(rows(x[0]), rows(x[1]), rows(x[2]),
                                             at::tensor({0, 2, 5}), at::tensor({0, 3, 7}),
                                             options));
       }},
      {"attention_weights",
       [](const Tensors& x) { return attention_weights(x[0], x[1], options_of(x)); }},
      {"hard_attention",
       [](const Tensors& x) {
         const auto options = AttentionOptions().attn_mask(x[3]).alibi_slopes(x[4]);
         return std::get<0>(hard_attention(x[0], x[1], x[2], options, true));
       }},
  };
}

class AutocastOperators : public testing::TestWithParam<Operator> {
 protected:
  static constexpr auto f32 = at::kFloat;
  const Tensors inputs = {randn({2, 4, 5, 8}, f32), randn({2, 4, 7, 8}, f32),
                          randn({2, 4, 7, 8}, f32), randn({5, 7}, f32),
                          randn({4}, f32),          randn({4}, f32)};
  at::Tensor run(const Tensors& x) const { return GetParam().run(x); }
};

// Results and gradients are those of query, key, value and attn_mask converted by hand.
TEST_P(AutocastOperators, CastsQueryKeyValueAndMask) {
  for (const auto dtype : {at::kBFloat16, at::kHalf}) {
    SCOPED_TRACE(dtype);
    Tensors converted = inputs;
    for (int i = 0; i < 4; ++i) converted[i] = inputs[i].to(dtype);
    const at::Tensor expected = run(converted);
    at::Tensor actual;
    {
      const Autocast autocast(dtype);
      actual = run(inputs);
    }
    EXPECT_EQ(actual.scalar_type(), dtype);
    EXPECT_TRUE(at::equal(actual, expected));
    const auto gradients = [&](const at::Tensor& result) {
      return torch::autograd::grad({result.to(f32).sin().sum()}, inputs, {}, {}, {}, true);
    };
    const auto actual_gradients = gradients(actual), expected_gradients = gradients(expected);
    for (size_t i = 0; i < inputs.size(); ++i) {
      SCOPED_TRACE(i);
      ASSERT_EQ(actual_gradients[i].defined(), expected_gradients[i].defined());
      if (!actual_gradients[i].defined()) continue;
      EXPECT_EQ(actual_gradients[i].scalar_type(), f32);
      EXPECT_TRUE(at::equal(actual_gradients[i], expected_gradients[i]));
    }
  }
}

TEST_P(AutocastOperators, LeavesFloat64Alone) {
  Tensors x = inputs;
  for (int i = 0; i < 3; ++i) x[i] = inputs[i].to(at::kDouble);
  const at::Tensor expected = run(x);
  const Autocast autocast(at::kBFloat16);
  EXPECT_TRUE(at::equal(run(x), expected));
}

TEST_P(AutocastOperators, IsOffWhereItIsOff) {
  const at::Tensor expected = run(inputs);
  const Autocast autocast(at::kBFloat16);
  {
    const Autocast off(at::kBFloat16, false);
    EXPECT_TRUE(at::equal(run(inputs), expected));
  }
  EXPECT_EQ(run(inputs).scalar_type(), at::kBFloat16);
}

// A backward pass under autocast computes the gradients of a call made outside as it would outside.
TEST_P(AutocastOperators, BackwardPassesAreNotCast) {
  const auto gradients = [&](const at::Tensor& result) {
    return torch::autograd::grad({result.sum()}, {inputs[0], inputs[1]});
  };
  const auto expected = gradients(run(inputs));
  const at::Tensor outside = run(inputs);
  const Autocast autocast(at::kBFloat16);
  const auto actual = gradients(outside);
  for (size_t i = 0; i < actual.size(); ++i) EXPECT_TRUE(at::equal(actual[i], expected[i]));
}

INSTANTIATE_TEST_SUITE_P(All, AutocastOperators, testing::ValuesIn(operators()),
                         [](const auto& info) { return info.param.name; });

class AutocastAttention : public testing::Test {
 protected:
  const at::Tensor query = randn({2, 4, 5, 8}, at::kFloat), key = randn({2, 4, 7, 8}, at::kFloat);
};

TEST_F(AutocastAttention, LeavesBooleanMasksAlone) {
  const auto options = AttentionOptions().attn_mask(at::randn({5, 7}).gt(-0.5));
  const auto half = key.to(at::kBFloat16);
  const auto expected = attention(query.to(at::kBFloat16), half, half, options);
  const Autocast autocast(at::kBFloat16);
  EXPECT_TRUE(at::equal(attention(query, key, key, options), expected));
}

TEST_F(AutocastAttention, LeavesOtherDevicesAlone) {
  const Autocast autocast(at::kBFloat16);
  const auto q = query.to(at::kMeta), k = key.to(at::kMeta);
  EXPECT_EQ(attention(q, k, k).scalar_type(), at::kFloat);
}

TEST_F(AutocastAttention, CastsOtherHalvesToo) {
  const Autocast autocast(at::kBFloat16);
  EXPECT_EQ(attention(query.to(at::kHalf), key, key.to(at::kBFloat16)).scalar_type(),
            at::kBFloat16);
}

TEST_F(AutocastAttention, StillRefusesMixedDtypes) {
  const Autocast autocast(at::kBFloat16);
  const auto error = [](const auto& call) { return message_of(call); };
  const auto wide = key.to(at::kDouble);
  EXPECT_NE(
      error([&] { attention(query, wide, wide); }).find("key is float64, but query is bfloat16"),
      std::string::npos);
  EXPECT_NE(error([&] {
              attention(query.to(at::kDouble), key, key);
            }).find("key is float32, but query is float64"),
            std::string::npos);
}

// A parameter is cast once, however often it is used.
TEST_F(AutocastAttention, CastsALeafOnce) {
  const auto cast_of_query = [&] {
    return attention(query, key, key).grad_fn()->next_edge(0).function;
  };
  const Autocast autocast(at::kBFloat16);
  EXPECT_EQ(cast_of_query(), cast_of_query());
}

}  // namespace
}  // namespace qkv::test::autocast_tests
