// The reference itself, against closed forms, and against what attention_forward and
// attention_backward promise for masked rows and NaN.
#include <gtest/gtest.h>

#include <cmath>

#include "cases.h"

namespace qkv::test {
namespace {

// Expects what scores of log 1, log 2 and log 3 give: weights of 1/6, 2/6 and 3/6. score(j, x)
// makes x the score of key j.
template <class Score>
void expect_sixths(Workload& w, const Score& score) {
  for (int j = 0; j < 3; ++j) {
    score(j, std::log(j + 1.0));
    w.value.set({0, j, 0}, std::pow(10.0, j));
  }
  const Results r = run(w, kReference);
  EXPECT_NEAR(r.output[0], (1 + 2 * 10 + 3 * 100) / 6.0, 1e-12);
  EXPECT_NEAR(r.lse[0], std::log(6.0), 1e-14);
}

TEST(Reference, WeightsAreTheSoftmaxOfTheScores) {
  Case c = small_case();
  c.L = 1, c.S = 3, c.D = 1, c.Dv = 1, c.scale = 0.5;
  Workload w(c);
  w.query.set({0, 0, 0}, 2);
  expect_sixths(w, [&](int j, double x) { w.key.set({0, j, 0}, x); });
}

TEST(Reference, AFloatMaskIsAddedToTheScores) {
  Case c = small_case();
  c.L = 1, c.S = 3, c.Dv = 1, c.scale = 0, c.mask_type = MaskType::f64;
  Workload w(c);
  expect_sixths(w, [&](int j, double x) { w.mask.set({0, 0, j}, x); });
}

// With a scale of 0 all keys that a row sees have the same weight.
TEST(Reference, CausalRowsAverageWhatTheySee) {
  Case c = small_case();
  c.L = 5, c.S = 3, c.scale = 0, c.is_causal = true;
  const Workload w(c);
  const Results r = run(w, kReference);
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

TEST(Reference, StridesDoNotMatter) {
  for (int seed = 0; seed < 20; ++seed) {
    Case c = small_case();
    c.batch = {2, 3}, c.kv_heads = 2, c.group = 2, c.mask_type = MaskType::f32;
    c.strided = true, c.seed = seed;
    const Workload w(c);
    expect_identical(run(w, kReference), run(w.in_f64(), kReference));
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
  expect_identical(run(repeated, kReference), run(written_out, kReference));
}

TEST(Reference, RowsWithNothingToAttendToAreZero) {
  for (MaskType type : {MaskType::boolean, MaskType::f32, MaskType::f64}) {
    Case c = small_case();
    c.mask_type = type;
    Workload w(c);
    w.mask.fill([&] { return type == MaskType::boolean ? 0 : -kInf; });
    w.grad_lse.fill([] { return kNaN; });  // the derivative of a loss at -inf may well be NaN
    const Results r = run(w, kReference);
    for (double x : r.lse) EXPECT_EQ(x, -kInf);
    for (const auto* zero : {&r.output, &r.grad_query, &r.grad_key, &r.grad_value})
      for (double x : *zero) EXPECT_EQ(x, 0);
  }
}

TEST(Reference, WhatIsMaskedDoesNotLeak) {
  for (double poison : {kNaN, kInf, -kInf}) {
    Case c = small_case();
    c.is_causal = true;  // no query sees key 3
    Workload clean(c), dirty(c);
    for (int d = 0; d < c.D; ++d) dirty.key.set({0, 3, d}, poison);
    for (int d = 0; d < c.Dv; ++d) dirty.value.set({0, 3, d}, poison);
    expect_identical(run(dirty, kReference), run(clean, kReference));
  }
}

// NaN and infinity that are not masked come out as softmax(query @ key^T) @ value gives them.
TEST(Reference, WhatIsNotMaskedDoes) {
  Case c = small_case();
  c.is_causal = true;
  Workload w(c);
  w.value.set({0, 1, 0}, kInf);
  Results r = run(w, kReference);
  EXPECT_TRUE(std::isfinite(r.output[0]));  // row 0 does not see key 1
  EXPECT_EQ(r.output[1 * 3], kInf);
  EXPECT_TRUE(std::isfinite(r.output[1 * 3 + 1]));

  Workload v(c);
  v.key.set({0, 1, 0}, kNaN);
  r = run(v, kReference);
  EXPECT_TRUE(std::isfinite(r.output[0]));
  EXPECT_TRUE(std::isnan(r.output[1 * 3]));
  EXPECT_TRUE(std::isnan(r.lse[2]));

  // A score of -inf without a mask gives weight 0, and 0 * NaN is NaN.
  c.D = 1, c.L = 1, c.S = 2, c.is_causal = false;
  Workload u(c);
  u.query.set({0, 0, 0}, 1);
  u.key.set({0, 1, 0}, -kInf);
  r = run(u, kReference);
  for (int d = 0; d < 3; ++d) EXPECT_EQ(r.output[d], u.value.get({0, 0, d}));
}

}  // namespace
}  // namespace qkv::test
