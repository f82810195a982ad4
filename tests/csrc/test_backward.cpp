// attention_backward, fed by attention_forward, against the f64 reference, on
// every instruction set.
#include <gtest/gtest.h>

#include "families.h"

namespace qkv::test {
namespace {

class BackwardTest : public IsaTest {
 protected:
  void expect_truth(const Case& c) { test::expect_truth(Workload(c)); }
};

QKV_FOR_EACH_ISA(BackwardTest);

TEST_P(BackwardTest, RandomCases) {
  for (auto [seed, end] = seeds(12, 150); seed < end && !HasFailure(); ++seed)
    expect_truth(random_case(seed + 1000));
}

TEST_P(BackwardTest, EveryLength) {
  for_every_length(200, [&](const Case& c) { expect_truth(c); });
}

TEST_P(BackwardTest, EveryHeadDim) {
  for_every_head_dim(1, [&](const Case& c) { expect_truth(c); });
}

TEST_P(BackwardTest, Causal) {
  for_causal([&](const Case& c) { expect_truth(c); });
}

// With so many keys, a plane has several splits, and grad_query is a sum of parts.
TEST_P(BackwardTest, ManyKeys) {
  for (int64_t L : {1, 30}) {
    for (int64_t S : {255, 257, 600, 2100}) {
      for (bool is_causal : {false, true}) {
        Case c;
        c.L = L, c.group = 2, c.S = kQuick ? S / 2 : S, c.D = 24, c.Dv = 40;
        c.is_causal = is_causal, c.num_threads = 2;
        expect_truth(c);
        c.dtype = DType::f64, c.strided = true, c.mask_type = MaskType::boolean;
        expect_truth(c);
      }
    }
  }
}

// A plane has several splits, and the keys of the last ones are seen by the last rows alone.
TEST_P(BackwardTest, CausalManyKeys) {
  for (int64_t L : {600, 900}) {
    for (int64_t group : {1, 3}) {
      Case c;
      c.L = L, c.S = 850, c.group = group, c.D = 3, c.Dv = 2;
      c.is_causal = true, c.num_threads = 2;
      expect_truth(c);
    }
  }
}

TEST_P(BackwardTest, BroadcastMasks) {
  for_broadcast_masks([&](const Case& c) { expect_truth(c); });
}

// Every combination of gradients given and wanted.
TEST_P(BackwardTest, AbsentGradients) {
  for (DType dtype : kDTypes) {
    for (int bits = 0; bits < 32; ++bits) {
      Case c;
      c.dtype = dtype, c.L = 20, c.S = 40, c.group = 2, c.is_causal = true;
      c.grad_query = bits & 1, c.grad_key = bits & 2, c.grad_value = bits & 4;
      c.grad_output = bits & 8, c.grad_lse = bits & 16;
      expect_truth(c);
    }
  }
}

// The gradients that sum().backward() passes have one number for all elements, and strides of 0.
TEST_P(BackwardTest, ExpandedGradients) {
  for (DType dtype : kDTypes) {
    Case c;
    c.dtype = dtype, c.batch = {2}, c.L = 33, c.S = 20;
    Workload w(c);
    for (Tensor* t : {&w.grad_output, &w.grad_lse}) {
      const int64_t cols = t == &w.grad_lse ? 1 : c.Dv;
      *t = Tensor(t == &w.grad_lse ? w.compute_element() : type_of(dtype),
                  w.sizes(w.c.heads(), c.L, cols), {0, 0, 0, 0});
      t->fill([] { return 1; });
    }
    test::expect_truth(w);
  }
}

// With one key the weight is 1 whatever the score, so the gradient of a score is nothing but
// rounding, which must not grow with the numbers that cancel.
TEST_P(BackwardTest, OneKey) {
  for (DType dtype : kDTypes) {
    Case c;
    c.dtype = dtype, c.L = 100, c.S = 1, c.D = 64, c.Dv = 64, c.grad_lse = false;
    expect_truth(c);
  }
}

TEST_P(BackwardTest, LargeScores) {
  for (DType dtype : kDTypes) {
    for (double scale : {8.0, -8.0}) {
      Case c;
      c.dtype = dtype, c.L = 40, c.S = 300, c.D = 16, c.scale = scale;
      expect_truth(c);
    }
  }
}

// The mask makes scores of any size. The log-sum-exp is as large as they are, and rounded, so that
// it leaves the weights fewer and fewer digits; but they never become NaN.
TEST_P(BackwardTest, ScoresOfAnySize) {
  for (DType dtype : kDTypes) {
    for (double size : {20.0, 90.0, 800.0, 3e3, 9e4, 1e6, 3e7, 1e12, 1e30}) {
      for (double sign : {1.0, -1.0}) {
        if (2 * size > largest_number(dtype)) continue;
        Case c;
        c.dtype = dtype, c.L = 19, c.S = 300;
        c.mask_type = float_masks(dtype).back();
        Workload w(c);
        w.mask.for_each([&](int64_t at) { w.mask.set(at, w.mask.get(at) + sign * size); });
        SCOPED_TRACE(::testing::Message() << c << " size " << sign * size);
        Results r = run(w), expected = truth(w, r);
        expected.output = r.output, expected.lse = r.lse;  // ForwardTest looks at these
        if (size < 1e6) expect_close(r, expected, c);
        for (const auto* all : {&r.output, &r.grad_query, &r.grad_key, &r.grad_value})
          for (double x : *all) ASSERT_TRUE(std::isfinite(x));
        if (HasFailure()) return;
      }
    }
  }
}

// The root mean square of the errors is far below the error that expect_close allows one element.
// In f64 the rounding of the reference itself is in it, which adds up one term after the other.
TEST_P(BackwardTest, RoundingErrorIsSmallOnAverage) {
  for (DType dtype : kDTypes) {
    Case c;
    c.dtype = dtype, c.L = 200, c.S = 200, c.D = 64, c.Dv = 64;
    const Workload w(c);
    const double most = is_half(dtype)        ? rms_of_rounding(dtype)
                        : dtype == DType::f64 ? 2e-15
                                              : 5e-7;
    const Results actual = run(w), expected = truth(w, actual);
    EXPECT_LT(relative_rms_error(actual.grad_query, expected.grad_query), most);
    EXPECT_LT(relative_rms_error(actual.grad_key, expected.grad_key), most);
    EXPECT_LT(relative_rms_error(actual.grad_value, expected.grad_value), most);
  }
}

// A NaN in grad_lse does not get through either: the derivative of a loss at lse = -inf often is
// NaN.
TEST_P(BackwardTest, RowsWithNothingToAttendToGiveZero) {
  for (DType dtype : kDTypes) {
    for (MaskType mask : all_masks(dtype)) {
      for (int64_t S : {0, 5, 700}) {
        Case c;
        c.dtype = dtype, c.L = 19, c.S = S, c.mask_type = mask;
        Workload w(c);
        w.mask.fill([&] { return mask == MaskType::boolean ? 0 : -kInf; });
        w.grad_lse.fill([] { return kNaN; });
        const Results r = run(w);
        for (const auto* zero : {&r.grad_query, &r.grad_key, &r.grad_value})
          for (double x : *zero) EXPECT_EQ(x, 0);
      }
    }
  }
}

}  // namespace
}  // namespace qkv::test
