// The reference itself: against closed forms, finite differences, and what
// attention_forward and attention_backward promise for masked rows and NaN.
#include <gtest/gtest.h>

#include <cmath>

#include "cases.h"

namespace qkv::test {
namespace {

Results run_reference(const Workload& w) {
  return run(w, reference::attention_forward, reference::attention_backward);
}

Case small_case() {
  Case c;
  c.dtype = DType::f64;
  c.L = 3, c.S = 4, c.D = 2, c.Dv = 3;
  return c;
}

// Scores log 1, log 2, log 3: weights 1/6, 2/6, 3/6.
TEST(Reference, WeightsAreTheSoftmaxOfTheScores) {
  Case c = small_case();
  c.L = 1, c.S = 3, c.D = 1, c.Dv = 1, c.scale = 0.5;
  Workload w(c);
  w.query.set({0, 0, 0}, 2);
  for (int j = 0; j < 3; ++j) {
    w.key.set({0, j, 0}, std::log(j + 1.0));
    w.value.set({0, j, 0}, std::pow(10.0, j));
  }
  const Results r = run_reference(w);
  EXPECT_NEAR(r.output[0], (1 + 2 * 10 + 3 * 100) / 6.0, 1e-12);
  EXPECT_NEAR(r.lse[0], std::log(6.0), 1e-14);
}

TEST(Reference, AFloatMaskIsAddedToTheScores) {
  Case c = small_case();
  c.L = 1, c.S = 3, c.Dv = 1, c.scale = 0, c.mask_type = MaskType::f64;
  Workload w(c);
  for (int j = 0; j < 3; ++j) {
    w.mask.set({0, 0, j}, std::log(j + 1.0));
    w.value.set({0, j, 0}, std::pow(10.0, j));
  }
  const Results r = run_reference(w);
  EXPECT_NEAR(r.output[0], (1 + 2 * 10 + 3 * 100) / 6.0, 1e-12);
  EXPECT_NEAR(r.lse[0], std::log(6.0), 1e-14);
}

// With scale 0 all that may be attended to weighs the same.
TEST(Reference, CausalRowsAverageWhatTheySee) {
  Case c = small_case();
  c.L = 5, c.S = 3, c.scale = 0, c.is_causal = true;
  const Workload w(c);
  const Results r = run_reference(w);
  for (int i = 0; i < c.L; ++i) {
    const int seen = std::min(i + 1, 3);
    EXPECT_NEAR(r.lse[i], std::log(double(seen)), 1e-14);
    for (int d = 0; d < c.Dv; ++d) {
      double mean = 0;
      for (int j = 0; j < seen; ++j) mean += w.value.get({0, j, d}) / seen;
      EXPECT_NEAR(r.output[i * c.Dv + d], mean, 1e-14);
    }
  }
}

// d/dx of loss = <grad_output, output> + <grad_lse, lse>, one element at a time.
double loss(const Workload& w) {
  const Tensor output = w.make_output(w.heads(), w.c.L, w.c.Dv);
  const Tensor lse = w.make_output(w.heads(), w.c.L, 1);
  reference::attention_forward(w.problem(), {output.output(), lse.output()});
  const auto x = output.values(), y = lse.values();
  const auto dx = w.grad_output.values(), dy = w.grad_lse.values();
  double sum = 0;
  for (size_t i = 0; i < dx.size(); ++i) sum += dx[i] * x[i];
  for (size_t i = 0; i < dy.size(); ++i)
    if (y[i] != -kInf) sum += dy[i] * y[i];
  return sum;
}

void expect_gradient(const char* name, const Workload& w, Tensor& input,
                     const std::vector<double>& gradient) {
  const double h = 1e-5;  // error h^2 from the third derivative, 1e-16 / h from rounding
  ASSERT_EQ(int64_t(gradient.size()), input.numel());
  size_t n = 0;
  input.for_each([&](int64_t at) {
    const double x = input.get(at);
    input.set(at, x + h);
    const double above = loss(w);
    input.set(at, x - h);
    const double below = loss(w);
    input.set(at, x);
    EXPECT_NEAR((above - below) / (2 * h), gradient[n], 2e-9) << name << " element " << n;
    ++n;
  });
}

class ReferenceGradient : public ::testing::TestWithParam<Case> {};

TEST_P(ReferenceGradient, MatchesFiniteDifferences) {
  Workload w(GetParam());
  Workload frozen(GetParam());
  const Results r = run_reference(frozen);
  expect_gradient("query", w, w.query, r.grad_query);
  expect_gradient("key", w, w.key, r.grad_key);
  expect_gradient("value", w, w.value, r.grad_value);
}

std::vector<Case> gradient_cases() {
  Case plain = small_case();
  plain.batch = {2};
  std::vector<Case> cases(9, plain);
  cases[1].is_causal = true;
  cases[2].mask_type = MaskType::boolean;
  cases[3].mask_type = MaskType::f64, cases[3].is_causal = true;
  cases[4].kv_heads = 2, cases[4].group = 3;
  cases[5].grad_lse = false;
  cases[6].grad_output = false;
  cases[7].scale = -1.5, cases[7].L = 5, cases[7].S = 2;
  cases[8].batch = {2, 1, 2}, cases[8].mask_type = MaskType::f32;
  return cases;
}

INSTANTIATE_TEST_SUITE_P(Cases, ReferenceGradient, ::testing::ValuesIn(gradient_cases()));

TEST(Reference, StridesDoNotMatter) {
  for (int seed = 0; seed < 20; ++seed) {
    Case c = small_case();
    c.batch = {2, 3}, c.kv_heads = 2, c.group = 2, c.mask_type = MaskType::f32;
    c.strided = true, c.seed = seed;
    const Workload w(c);
    expect_identical(run_reference(w), truth(w));
  }
}

TEST(Reference, HeadRepeatReadsOneHeadSeveralTimes) {
  Case c = small_case();
  c.kv_heads = 6, c.group = 2, c.key_head_repeat = 2, c.value_head_repeat = 3;
  const Workload repeated(c);
  c.key_head_repeat = c.value_head_repeat = 1;
  Workload written_out(c);
  written_out.query = repeated.query.dense(Type::f64);
  written_out.grad_output = repeated.grad_output.dense(Type::f64);
  written_out.grad_lse = repeated.grad_lse.dense(Type::f64);
  for (int h = 0; h < 6; ++h) {
    for (int j = 0; j < c.S; ++j) {
      for (int d = 0; d < c.D; ++d) written_out.key.set({h, j, d}, repeated.key.get({h / 2, j, d}));
      for (int d = 0; d < c.Dv; ++d)
        written_out.value.set({h, j, d}, repeated.value.get({h / 3, j, d}));
    }
  }
  expect_identical(run_reference(repeated), run_reference(written_out));
}

TEST(Reference, RowsWithNothingToAttendToAreZero) {
  for (MaskType type : {MaskType::boolean, MaskType::f32, MaskType::f64}) {
    Case c = small_case();
    c.mask_type = type;
    Workload w(c);
    w.mask.fill([&] { return type == MaskType::boolean ? 0 : -kInf; });
    w.grad_lse.fill([] { return kNaN; });  // as the derivative at -inf may well be
    const Results r = run_reference(w);
    for (double x : r.lse) EXPECT_EQ(x, -kInf);
    for (const auto* zero : {&r.output, &r.grad_query, &r.grad_key, &r.grad_value})
      for (double x : *zero) EXPECT_EQ(x, 0);
  }
}

TEST(Reference, WhatIsMaskedDoesNotLeak) {
  for (double poison : {kNaN, kInf, -kInf}) {
    Case c = small_case();
    c.is_causal = true;  // nobody sees key 3
    Workload clean(c), dirty(c);
    for (int d = 0; d < c.D; ++d) dirty.key.set({0, 3, d}, poison);
    for (int d = 0; d < c.Dv; ++d) dirty.value.set({0, 3, d}, poison);
    expect_identical(run_reference(dirty), run_reference(clean));
  }
}

// As softmax(query @ key^T) @ value gives them.
TEST(Reference, WhatIsNotMaskedDoes) {
  Case c = small_case();
  c.is_causal = true;
  Workload w(c);
  w.value.set({0, 1, 0}, kInf);
  Results r = run_reference(w);
  EXPECT_TRUE(std::isfinite(r.output[0]));  // row 0 does not see key 1
  EXPECT_EQ(r.output[1 * 3], kInf);
  EXPECT_TRUE(std::isfinite(r.output[1 * 3 + 1]));

  Workload v(c);
  v.key.set({0, 1, 0}, kNaN);
  r = run_reference(v);
  EXPECT_TRUE(std::isfinite(r.output[0]));
  EXPECT_TRUE(std::isnan(r.output[1 * 3]));
  EXPECT_TRUE(std::isnan(r.lse[2]));

  // A score of -inf that is no mask: weight 0, but 0 * NaN is NaN.
  c.D = 1, c.L = 1, c.S = 2, c.is_causal = false;
  Workload u(c);
  u.query.set({0, 0, 0}, 1);
  u.key.set({0, 1, 0}, -kInf);
  r = run_reference(u);
  for (int d = 0; d < 3; ++d) EXPECT_EQ(r.output[d], u.value.get({0, 0, d}));
}

}  // namespace
}  // namespace qkv::test
