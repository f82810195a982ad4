// attention_jvp against the f64 reference, on every instruction set.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "expect_near.h"
#include "families.h"

namespace qkv::test {
namespace {

// The errors that are allowed, by the reasons that expect_close.cpp gives. `change` is about the
// largest change of a score; it errs as scores do, and a weight errs by `score`, relative to
// itself, and so does what it is multiplied by the change.
void expect_jvp(const JvpResults& actual, const JvpResults& expected, const JvpWorkload& w) {
  const Case& c = w.c;
  const double eps = c.dtype == DType::f64 ? std::numeric_limits<double>::epsilon()
                                           : double(std::numeric_limits<float>::epsilon());
  const auto size = [&](double n) { return c.strided ? n : std::sqrt(n); };
  const auto error = [&](double n) { return eps * (4 + std::sqrt(n) * size(n)); };
  const double D = double(c.D), length = double(c.L + c.S);
  const double scale = std::abs(c.effective_scale()), dot_error = scale * error(D);
  double score = 4 * eps + dot_error, change = 1 + 4 * scale * size(D),
         change_error = 2 * dot_error;
  if (c.softcap > 0) score += 4 * eps * std::min(c.softcap, 4 * scale * size(D));
  if (c.alibi_slopes) score += eps / 4 * length, change += length / 4;
  if (c.mask_type != MaskType::none) change += 4;
  if (c.bias_type != MaskType::none) change += 4;
  if (c.sinks) change += 4;
  const double keep = c.dropout_p > 0 && c.dropout_p < 1 ? 1 / (1 - c.dropout_p) : 1;
  const double lse_jvp = 6 * (change * (score + eps) + change_error);
  double output_jvp = 6 * keep * (score + change * (score + 4 * eps) + change_error);
  // The given output is rounded, and as large as the weights that dropout keeps make it.
  if (w.given_output) output_jvp += 4 * rounding(c.dtype, keep * change);
  if (!w.given_output)
    expect_near("output", actual.output, expected.output, 6 * keep * score, c.dtype);
  const DType compute = compute_type(c.dtype);
  expect_near("lse", actual.lse, expected.lse, 6 * score + eps * largest_finite(expected.lse),
              compute);
  expect_near("output_jvp", actual.output_jvp, expected.output_jvp, output_jvp, c.dtype);
  expect_near("lse_jvp", actual.lse_jvp, expected.lse_jvp, lse_jvp, compute);
}

void expect_truth(const JvpWorkload& w) {
  SCOPED_TRACE(::testing::Message() << w.c);
  expect_jvp(run_jvp(w), jvp_truth(w), w);
}

class JvpTest : public IsaTest {};

QKV_FOR_EACH_ISA(JvpTest);

TEST_P(JvpTest, RandomCases) {
  for (auto [seed, end] = seeds(12, 200); seed < end && !HasFailure(); ++seed)
    expect_truth(JvpWorkload(random_case(seed + 3000)));
}

TEST_P(JvpTest, AbsentDirections) {
  for_absent_directions([&](const Case& c, int along) { expect_truth(JvpWorkload(c, along)); });
}

TEST_P(JvpTest, EveryLength) {
  for_every_length(200, [&](const Case& c) { expect_truth(JvpWorkload(c)); });
}

TEST_P(JvpTest, EveryHeadDim) {
  for_every_head_dim(3, [&](const Case& c) { expect_truth(JvpWorkload(c)); });
}

TEST_P(JvpTest, CausalAndWindows) {
  for_causal_and_windows({1, 19, 70, 151}, [&](const Case& c) { expect_truth(JvpWorkload(c)); });
}

TEST_P(JvpTest, BroadcastMasks) {
  for_broadcast_masks([&](const Case& c) {
    JvpWorkload w(c);
    if (w.mask_jvp) {
      w.mask_jvp = Tensor(type_of(c.mask_type), w.mask.sizes(), c.mask_strides);
      w.mask_jvp.fill([n = 0]() mutable { return std::sin(double(n++)); });
    }
    expect_truth(w);
  });
}

// With the output of a forward pass given, derivatives are the same: to the last bit, except where
// few rows then have their scores made in the forward pass's way (JvpArgs::output).
TEST_P(JvpTest, GivenOutput) {
  for (auto [seed, end] = seeds(5, 60); seed < end && !HasFailure(); ++seed) {
    Case c = random_case(seed + 4000);
    JvpWorkload w(c);
    const JvpResults all = run_jvp(w);
    w.given_output = w.make_output(type_of(c.dtype), c.heads(), c.L, c.Dv);
    size_t n = 0;
    w.given_output.fill([&] { return all.output[n++]; });
    expect_truth(w);
    const JvpResults given = run_jvp(w);
    if (score_way_of(w.problem()) == ScoreWay::few_rows) continue;
    EXPECT_EQ(given.lse, all.lse);
    EXPECT_EQ(given.lse_jvp, all.lse_jvp);
  }
}

TEST_P(JvpTest, OutputAndLseAreThoseOfTheForwardPass) {
  for (int seed = 0; seed < 20 && !HasFailure(); ++seed) {
    Case c = random_case(seed + 5000);
    c.lse = true;
    const JvpWorkload w(c);
    const Results forward = run_forward(w);
    const JvpResults all = run_jvp(w);
    JvpResults expected = jvp_truth(w);
    expected.output = forward.output, expected.lse = forward.lse;
    if (!multiplies_pairs(active_isa()) || c.dtype != DType::bf16) expect_jvp(all, expected, w);
  }
}

TEST_P(JvpTest, RowsWithNothingToAttendToAreZero) {
  for (DType dtype : kDTypes) {
    for (MaskType mask : all_masks(dtype)) {
      for (int64_t S : {0, 5, 700}) {
        Case c;
        c.dtype = dtype, c.L = 19, c.S = S, c.mask_type = mask;
        JvpWorkload w(c);
        w.mask.fill([&] { return mask == MaskType::boolean ? 0 : -kInf; });
        for (Tensor* t : w.directions())
          if (*t) t->fill([] { return kNaN; });
        const JvpResults r = run_jvp(w);
        for (const auto* all : {&r.output, &r.output_jvp, &r.lse_jvp})
          for (double x : *all) ASSERT_EQ(x, 0);
        for (double x : r.lse) ASSERT_EQ(x, -kInf);
      }
    }
  }
}

TEST_P(JvpTest, HiddenKeysDoNotLeak) {
  for_hidden_keys([&](const JvpWorkload& clean, const JvpWorkload& dirty) {
    expect_same_bits(run_jvp(dirty), run_jvp(clean));
    expect_truth(clean);
  });
}

// One number that is not finite reaches those rows that see it and no others.
TEST_P(JvpTest, OnePoisonedElement) {
  for (auto [seed, end] = seeds(50, 1000); seed < end && !HasFailure(); ++seed) {
    Random random(seed);
    JvpWorkload w(draw_small_case(random, seed));
    poison(random, {&w.query, &w.key, &w.value, &w.sinks, &w.query_jvp, &w.key_jvp, &w.value_jvp,
                    &w.mask_jvp, &w.bias_jvp, &w.slopes_jvp, &w.sinks_jvp});
    SCOPED_TRACE(::testing::Message() << "seed " << seed);
    expect_truth(w);
  }
}

TEST_P(JvpTest, AnyNumberOfThreads) {
  for (const Case& c : cases_for_threads(300)) {
    SCOPED_TRACE(::testing::Message() << c);
    JvpWorkload w(c);
    w.value_jvp.set(5, -kNaN), w.key.set(7, kInf);
    w.c.num_threads = 1;
    const JvpResults expected = run_jvp(w);
    for (int num_threads : {2, 3, 7}) {
      w.c.num_threads = num_threads;
      expect_same_bits(run_jvp(w), expected);
    }
  }
}

TEST_P(JvpTest, ABatchOfOneAndTheSameItemAmongEight) {
  for (const Case& c : cases_for_threads(300)) {
    SCOPED_TRACE(::testing::Message() << c);
    JvpWorkload eight(c);
    Case one_case = c;
    one_case.batch = {}, one_case.dropout_batch = 5;
    JvpWorkload one(one_case);
    const auto copy = [](std::vector<Tensor*> to, std::vector<Tensor*> from) {
      for (size_t n = 0; n < to.size(); ++n)
        for (int64_t i = 0; i < (*to[n] ? to[n]->numel() : 0); ++i)
          to[n]->set(i, from[n]->get(5 * to[n]->numel() + i));
    };
    copy(one.moved(), eight.moved());
    copy(one.directions(), eight.directions());
    const JvpResults all = run_jvp(eight);
    const auto item = [](const std::vector<double>& x) {
      const int64_t n = int64_t(x.size()) / 8;
      return std::vector<double>(x.begin() + 5 * n, x.begin() + 6 * n);
    };
    expect_same_bits(run_jvp(one),
                     {item(all.output), item(all.lse), item(all.output_jvp), item(all.lse_jvp)});
  }
}

// The root mean square of the errors is far below the error that is allowed one element.
TEST_P(JvpTest, RoundingErrorIsSmallOnAverage) {
  for (DType dtype : kDTypes) {
    Case c;
    c.dtype = dtype, c.L = 64, c.S = 700, c.D = 64, c.Dv = 64;
    const JvpWorkload w(c);
    const JvpResults actual = run_jvp(w), expected = jvp_truth(w);
    const bool f64 = dtype == DType::f64;
    const double most = dtype == DType::bf16  ? 0.22 * 0x1p-7
                        : dtype == DType::f16 ? 0.22 * 0x1p-10
                        : f64                 ? 2e-15
                                              : 5e-7;
    EXPECT_LT(relative_rms_error(actual.output_jvp, expected.output_jvp), most) << c;
    EXPECT_LT(relative_rms_error(actual.lse_jvp, expected.lse_jvp), f64 ? 2e-15 : 5e-7) << c;
  }
}

}  // namespace
}  // namespace qkv::test
