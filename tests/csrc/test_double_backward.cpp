// attention_backward with a direction against the f64 reference, on every instruction set.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "double_workload.h"
#include "expect_near.h"
#include "families.h"

namespace qkv::test {
namespace {

// The errors that are allowed, by the reasons that expect_close.cpp gives. The gradient of a score
// is about `size` large, how scores change about `change`, and both err as a weight does and by the
// errors of their own dot products.
struct Allowed {
  double score, query, key, value, shared, rows, keys, length;

  Allowed(const Case& c, const Results& expected) {
    const double eps = c.dtype == DType::f64 ? std::numeric_limits<double>::epsilon()
                                             : double(std::numeric_limits<float>::epsilon());
    const auto sum = [&](double n) { return c.strided ? n : std::sqrt(n); };
    const auto error = [&](double n) { return eps * (4 + std::sqrt(n) * sum(n)); };
    const double D = double(c.D), scale = std::abs(c.effective_scale()), L = double(c.L);
    length = L + double(c.S);
    const double dot_error = scale * error(D), dot_change = 1 + 4 * scale * sum(D);
    double weight = 4 * eps + dot_error + eps * largest_finite(expected.lse), change = dot_change;
    if (c.softcap > 0) weight += 4 * eps * std::min(c.softcap, 4 * scale * sum(D));
    if (c.alibi_slopes) weight += eps / 4 * length, change += length / 4;
    for (bool more : {c.float_mask(), c.bias_type != MaskType::none, c.sinks}) change += 4 * more;
    const double keep = c.dropout_p > 0 && c.dropout_p < 1 ? 1 / (1 - c.dropout_p) : 1;
    const double size = keep * (1 + 2 * sum(double(c.Dv)));
    const double grad_error = keep * error(double(c.Dv));
    score = 6 * ((weight + 4 * eps) * (1 + change) * size + 2 * dot_error * size +
                 (1 + change) * grad_error);
    const double curve = c.softcap > 0 ? 1 + dot_change / c.softcap : 1;
    rows = sum(L * double(c.group)), keys = sum(L);
    query = scale * (curve * score + 6 * curve * (weight * size + grad_error));
    key = query * rows;
    value = 6 * keep * ((weight + 4 * eps) * (1 + change) + 2 * dot_error) * rows;
    double sharers = c.share_heads ? double(c.heads()) : 1;
    for (int64_t b : c.batch) sharers *= c.share_batch ? double(b) : 1;
    shared = sum(sharers) * std::sqrt(sharers);
  }
};

void expect_second(const Results& actual, const Results& expected, const Case& c) {
  const Allowed allowed(c, expected);
  const DType compute = compute_type(c.dtype);
  const auto near = [&](const char* name, std::vector<double> Results::* of, double tolerance,
                        DType stored) {
    expect_near(name, actual.*of, expected.*of, tolerance, stored);
  };
  near("grad_query", &Results::grad_query, allowed.query, c.dtype);
  near("grad_key", &Results::grad_key, allowed.key, c.dtype);
  near("grad_value", &Results::grad_value, allowed.value, c.dtype);
  // What is there before, and is added to, is at most 1.
  const double eps = std::numeric_limits<float>::epsilon();
  const auto sum = [&](std::vector<double> Results::* of) {
    return allowed.score * allowed.shared +
           eps * allowed.shared * (1 + largest_finite(expected.*of));
  };
  near("grad_mask", &Results::grad_mask, sum(&Results::grad_mask), compute);
  near("grad_bias", &Results::grad_bias, sum(&Results::grad_bias), compute);
  for (auto keys : {&Results::grad_mask_keys, &Results::grad_bias_keys})
    near("grad of a mask's keys", keys, allowed.score * allowed.keys, compute);
  for (auto queries : {&Results::grad_mask_queries, &Results::grad_bias_queries})
    near("grad of a mask's queries", queries, allowed.score, compute);
  near("grad_alibi_slopes", &Results::grad_alibi_slopes,
       allowed.score * allowed.keys * allowed.length, compute);
  near("grad_sinks", &Results::grad_sinks, allowed.score * allowed.keys, compute);
}

Results expect_second_truth(const JvpWorkload& w) {
  SCOPED_TRACE(::testing::Message() << w.c);
  FirstPasses left;
  const Results actual = run_double(w, kKernels, attention_jvp, &left);
  expect_second(actual, double_truth(w, left), w.c);
  return actual;
}

// All gradients that a case can have; a mask's broadcast gradient is in random_case.
Case with_all_gradients(Case c) {
  c.grad_mask = c.float_mask(), c.grad_bias = c.bias_type != MaskType::none;
  c.grad_alibi_slopes = c.alibi_slopes, c.grad_sinks = c.sinks;
  return c;
}

class DoubleBackwardTest : public IsaTest {};

QKV_FOR_EACH_ISA(DoubleBackwardTest);

TEST_P(DoubleBackwardTest, RandomCases) {
  for (auto [seed, end] = seeds(15, 250); seed < end && !HasFailure(); ++seed) {
    Case c = random_case(seed + 6000);
    c.grad_weights = c.weights = false;
    expect_second_truth(JvpWorkload(c));
  }
}

TEST_P(DoubleBackwardTest, AbsentDirections) {
  for_absent_directions([&](Case c, int along) {
    c.grad_output = along % 7 != 3, c.grad_lse = along % 4 != 1;
    expect_second_truth(JvpWorkload(with_all_gradients(c), along));
  });
}

TEST_P(DoubleBackwardTest, EveryLength) {
  for_every_length(200, [&](const Case& c) { expect_second_truth(JvpWorkload(c)); });
}

TEST_P(DoubleBackwardTest, EveryHeadDim) {
  for_every_head_dim(3, [&](const Case& c) { expect_second_truth(JvpWorkload(c)); });
}

TEST_P(DoubleBackwardTest, CausalAndWindows) {
  for_causal_and_windows({1, 19, 70, 151, 530},
                         [&](const Case& c) { expect_second_truth(JvpWorkload(c)); });
}

TEST_P(DoubleBackwardTest, HiddenKeysDoNotLeak) {
  for_hidden_keys([&](const JvpWorkload& clean, const JvpWorkload& dirty) {
    expect_identical(run_double(dirty), run_double(clean));
    expect_second_truth(clean);
  });
}

// One number that is not finite reaches what depends on it and nothing else.
TEST_P(DoubleBackwardTest, OnePoisonedElement) {
  for (auto [seed, end] = seeds(50, 1000); seed < end && !HasFailure(); ++seed) {
    Random random(seed);
    Case c = draw_small_case(random, seed);
    c.grad_weights = c.weights = false;
    JvpWorkload w(c);
    poison(random, {&w.query, &w.key, &w.value, &w.query_jvp, &w.key_jvp, &w.value_jvp, &w.mask_jvp,
                    &w.bias_jvp, &w.slopes_jvp, &w.sinks_jvp, &w.grad_output, &w.grad_lse});
    SCOPED_TRACE(::testing::Message() << "seed " << seed);
    expect_second_truth(w);
  }
}

TEST_P(DoubleBackwardTest, AnyNumberOfThreads) {
  for (const Case& plain : cases_for_threads(600)) {
    const Case c = with_all_gradients(plain);
    SCOPED_TRACE(::testing::Message() << c);
    JvpWorkload w(c);
    w.value_jvp.set(5, -kNaN), w.key.set(7, kInf);
    w.c.num_threads = 1;
    const Results expected = run_double(w);
    for (int num_threads : {2, 3, 7}) {
      w.c.num_threads = num_threads;
      expect_identical(run_double(w), expected);
    }
  }
}

// The root mean square of the errors is far below the error that is allowed one element.
TEST_P(DoubleBackwardTest, RoundingErrorIsSmallOnAverage) {
  for (DType dtype : kDTypes) {
    Case c;
    c.dtype = dtype, c.L = 64, c.S = 700, c.D = 64, c.Dv = 64;
    const JvpWorkload w(c);
    FirstPasses left;
    const Results actual = run_double(w, kKernels, attention_jvp, &left);
    const Results expected = double_truth(w, left);
    const double most = dtype == DType::bf16  ? 0.22 * 0x1p-7
                        : dtype == DType::f16 ? 0.22 * 0x1p-10
                        : dtype == DType::f64 ? 2e-15
                                              : 1e-6;
    for (auto of : {&Results::grad_query, &Results::grad_key, &Results::grad_value})
      EXPECT_LT(relative_rms_error(actual.*of, expected.*of), most) << c;
  }
}

}  // namespace
}  // namespace qkv::test
