// attention_backward with a direction against the f64 reference, on every instruction set.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "double_workload.h"
#include "expect_near.h"

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

// Any of the directions may be absent.
TEST_P(DoubleBackwardTest, AbsentDirections) {
  for (DType dtype : kDTypes) {
    for (int along = 0; along <= kAlongAll; along += kQuick ? 5 : 1) {
      Case c;
      c.dtype = dtype, c.L = 20, c.S = 40, c.group = 2, c.is_causal = along % 3 == 0;
      c.mask_type = float_masks(dtype)[along % 2], c.bias_type = float_masks(dtype)[0];
      c.alibi_slopes = c.sinks = true;
      c.softcap = along % 2, c.dropout_p = along % 5 == 0 ? 0.3 : 0;
      c.grad_output = along % 7 != 3, c.grad_lse = along % 4 != 1;
      expect_second_truth(JvpWorkload(with_all_gradients(c), along));
      if (HasFailure()) return;
    }
  }
}

TEST_P(DoubleBackwardTest, EveryLength) {
  for (DType dtype : kDTypes) {
    Case c;
    c.dtype = dtype, c.D = 3, c.Dv = 2;
    for (int64_t n = 0; n <= 200 && !HasFailure(); n += kQuick ? 7 : 1) {
      c.L = n, c.S = 5, expect_second_truth(JvpWorkload(c));
      c.L = 5, c.S = n, expect_second_truth(JvpWorkload(c));
    }
  }
}

TEST_P(DoubleBackwardTest, EveryHeadDim) {
  for (DType dtype : kDTypes) {
    Case c;
    c.dtype = dtype, c.L = 3, c.S = 5, c.scale = 0.3;
    for (int64_t n = 0; n <= 300 && !HasFailure(); n += kQuick ? 7 : 3) {
      c.D = n, c.Dv = 5, expect_second_truth(JvpWorkload(c));
      c.D = 5, c.Dv = n, expect_second_truth(JvpWorkload(c));
    }
  }
}

TEST_P(DoubleBackwardTest, CausalAndWindows) {
  for (int64_t L : {1, 20, 70, 150}) {
    for (int64_t S : {1, 19, 70, 151, 530}) {
      for (int64_t left : {-1, 0, 40}) {
        Case c;
        c.L = L, c.S = S, c.group = L % 3 + 1, c.is_causal = true, c.window_left = left;
        expect_second_truth(JvpWorkload(c));
        c.dtype = DType::bf16, c.is_causal = false, c.window_right = 3;
        expect_second_truth(JvpWorkload(c));
      }
    }
  }
}

// Keys that no query sees become NaN or infinite, and so do their directions and those of the
// mask: no result may change.
TEST_P(DoubleBackwardTest, HiddenKeysDoNotLeak) {
  for (DType dtype : kDTypes) {
    for (MaskType mask : all_masks(dtype)) {
      for (double poison : {kNaN, kInf}) {
        for (int64_t S : {7, 40, 300}) {
          Case c;
          c.dtype = dtype, c.L = 21, c.S = S, c.group = 2, c.mask_type = mask;
          c.softcap = S == 40 ? 3 : 0;
          JvpWorkload clean(c), dirty(c);
          for (int64_t j = 0; j < S; j += 3) {
            for (int64_t h = 0; h < 2; ++h)
              for (int64_t i = 0; i < c.L; ++i) {
                for (JvpWorkload* w : {&clean, &dirty})
                  w->mask.set({h, i, j}, mask == MaskType::boolean ? 0 : -kInf);
                if (dirty.mask_jvp) dirty.mask_jvp.set({h, i, j}, poison);
              }
            for (Tensor* t : {&dirty.key, &dirty.value, &dirty.key_jvp, &dirty.value_jvp})
              for (int64_t d = 0; d < t->sizes().back(); ++d)
                if ((j + d) % 2 == 0) t->set({0, j, d}, poison);
          }
          SCOPED_TRACE(::testing::Message() << c << " poison " << poison);
          expect_identical(run_double(dirty), run_double(clean));
          expect_second_truth(clean);
          if (HasFailure()) return;
        }
      }
    }
  }
}

// One number that is not finite reaches what depends on it and nothing else.
TEST_P(DoubleBackwardTest, OnePoisonedElement) {
  for (auto [seed, end] = seeds(50, 1000); seed < end && !HasFailure(); ++seed) {
    Random random(seed);
    Case c;
    c.seed = seed, c.dtype = draw_dtype(random), c.group = draw(random, 1, 2);
    c.L = draw(random, 1, 40), c.S = draw(random, 1, 150);
    c.D = draw(random, 1, 20), c.Dv = draw(random, 1, 20);
    draw_options(random, c);
    c.grad_weights = c.weights = false;
    JvpWorkload w(c);
    std::vector<Tensor*> all;
    for (Tensor* t :
         {&w.query, &w.key, &w.value, &w.query_jvp, &w.key_jvp, &w.value_jvp, &w.mask_jvp,
          &w.bias_jvp, &w.slopes_jvp, &w.sinks_jvp, &w.grad_output, &w.grad_lse})
      if (*t) all.push_back(t);
    Tensor& t = *draw_from(random, all);
    t.set(draw(random, 0, t.numel() - 1), draw_from<double>(random, {kNaN, kInf, -kInf}));
    SCOPED_TRACE(::testing::Message() << "seed " << seed);
    expect_second_truth(w);
  }
}

std::vector<Case> double_threads_cases() {
  Case heads;
  heads.batch = {8}, heads.kv_heads = 3, heads.group = 2;
  heads.L = 70, heads.S = 90, heads.D = 40, heads.Dv = 24;
  Case causal;
  causal.batch = {8}, causal.L = 200, causal.S = 600, causal.D = causal.Dv = 32;
  causal.is_causal = true, causal.mask_type = MaskType::f32;
  std::vector<Case> all;
  for (Case c : {heads, causal}) {
    all.push_back(with_all_gradients(c));
    c.dtype = DType::f64, c.sinks = c.alibi_slopes = true;
    c.window_left = 50, c.softcap = 2, c.dropout_p = 0.3;
    all.push_back(with_all_gradients(c));
    c.dtype = DType::bf16;
    all.push_back(with_all_gradients(c));
  }
  return all;
}

TEST_P(DoubleBackwardTest, AnyNumberOfThreads) {
  for (const Case& c : double_threads_cases()) {
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
