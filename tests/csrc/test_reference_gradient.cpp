// The gradients of the reference against finite differences.
#include <gtest/gtest.h>

#include <cmath>

#include "cases.h"

namespace qkv::test {
namespace {

// loss = <grad_output, output> + <grad_lse, lse> + <grad_weights, weights>
double loss(const Workload& w) {
  const Outputs outputs(w);
  kReference.forward(w.problem(), outputs.forward_result(true));
  const Results r = outputs.values();
  const auto dot = [](const std::vector<double>& x, const Tensor& gradient) {
    const std::vector<double> y = gradient.values();
    double sum = 0;
    for (size_t i = 0; i < y.size(); ++i)
      if (x[i] != -kInf) sum += x[i] * y[i];
    return sum;
  };
  return dot(r.output, w.grad_output) + dot(r.lse, w.grad_lse) + dot(r.weights, w.grad_weights);
}

// Expects that `gradient` has the derivative of loss() with respect to each element of `input`.
void expect_gradient(const char* name, const Workload& w, Tensor& input,
                     const std::vector<double>& gradient) {
  if (!input) return;
  const double h = 1e-5;  // errs by h^2 times the third derivative, and by 1e-16 / h of rounding
  ASSERT_EQ(int64_t(gradient.size()), input.numel()) << name;
  size_t n = 0;
  input.for_each([&](int64_t at) {
    const double x = input.get(at);
    input.set(at, x + h);
    const double above = loss(w);
    input.set(at, x - h);
    const double below = loss(w);
    input.set(at, x);
    EXPECT_NEAR((above - below) / (2 * h), gradient[n], 4e-9) << name << " element " << n;
    ++n;
  });
}

class ReferenceGradient : public ::testing::TestWithParam<Case> {};

TEST_P(ReferenceGradient, MatchesFiniteDifferences) {
  Workload w(GetParam());
  SCOPED_TRACE(::testing::Message() << w.c);
  const Workload frozen(w.c);
  const Results r = run(frozen, kReference);
  expect_gradient("query", w, w.query, r.grad_query);
  expect_gradient("key", w, w.key, r.grad_key);
  expect_gradient("value", w, w.value, r.grad_value);
  expect_gradient("slopes", w, w.alibi_slopes, r.grad_alibi_slopes);
  expect_gradient("sinks", w, w.sinks, r.grad_sinks);
  // These are added to what is there.
  const auto expect_mask_gradient = [&](const char* name, Tensor& mask,
                                        std::vector<double> gradient) {
    const std::vector<double> before = frozen.make_grad_mask().values();
    for (size_t n = 0; n < before.size(); ++n) gradient[n] -= before[n];
    expect_gradient(name, w, mask, gradient);
  };
  if (w.c.grad_mask) expect_mask_gradient("mask", w.mask, r.grad_mask);
  if (w.c.grad_bias) expect_mask_gradient("bias", w.bias, r.grad_bias);
}

std::vector<Case> gradient_cases() {
  Case plain = small_case();
  plain.batch = {2};
  Case options = plain;
  options.weights = options.grad_weights = true;
  options.alibi_slopes = options.grad_alibi_slopes = options.sinks = options.grad_sinks = true;
  std::vector<Case> cases;
  for (Case c : {plain, options}) {
    std::vector<Case> some(11, c);
    some[1].is_causal = true;
    some[2].mask_type = MaskType::boolean;
    some[3].mask_type = MaskType::f64, some[3].is_causal = true, some[3].grad_mask = true;
    some[4].kv_heads = 2, some[4].group = 3;
    some[5].grad_lse = false;
    some[6].grad_output = false;
    some[7].scale = -1.5, some[7].L = 5, some[7].S = 2;
    some[8].batch = {2, 1, 2}, some[8].mask_type = MaskType::f32;
    some[9].softcap = 0.7, some[9].window_left = 1, some[9].window_right = 0;
    some[10].dropout_p = 0.4, some[10].dropout_batch = 7;
    cases.insert(cases.end(), some.begin(), some.end());
  }
  Case all = options;
  all.mask_type = MaskType::f64, all.grad_mask = true, all.is_causal = true;
  all.bias_type = MaskType::f64, all.grad_bias = true;
  all.L = 5, all.S = 6, all.window_left = 3, all.window_right = 2;
  all.softcap = 1.5, all.dropout_p = 0.3;
  cases.push_back(all);
  return cases;
}

INSTANTIATE_TEST_SUITE_P(Cases, ReferenceGradient, ::testing::ValuesIn(gradient_cases()));

}  // namespace
}  // namespace qkv::test
