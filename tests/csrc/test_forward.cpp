// attention_forward against the f64 reference, on every instruction set.
#include <gtest/gtest.h>

#include "families.h"

namespace qkv::test {
namespace {

class ForwardTest : public IsaTest {
 protected:
  void expect_truth(const Case& c) { expect_forward_truth(Workload(c)); }
};

QKV_FOR_EACH_ISA(ForwardTest);

TEST_P(ForwardTest, RandomCases) {
  for (auto [seed, end] = seeds(12, 150); seed < end && !HasFailure(); ++seed)
    expect_truth(random_case(seed));
}

TEST_P(ForwardTest, EveryLength) {
  for_every_length(200, [&](const Case& c) { expect_truth(c); });
}

TEST_P(ForwardTest, EveryHeadDim) {
  for_every_head_dim(1, [&](const Case& c) { expect_truth(c); });
}

TEST_P(ForwardTest, Causal) {
  for_causal([&](const Case& c) { expect_truth(c); });
}

TEST_P(ForwardTest, BroadcastMasks) {
  for_broadcast_masks([&](const Case& c) { expect_truth(c); });
}

TEST_P(ForwardTest, LargeScores) {
  for (DType dtype : kDTypes) {
    for (double scale : {8.0, -8.0}) {
      Case c;
      c.dtype = dtype, c.L = 40, c.S = 300, c.D = 16, c.scale = scale;
      expect_truth(c);
    }
  }
}

// Scores that need no rounding in the dtype may be of any size: the weights are as accurate as
// those of small scores.
TEST_P(ForwardTest, ExactScoresOfAnySize) {
  for (DType dtype : kDTypes) {
    for (double size : {0.0, 20.0, 90.0, 800.0, 3e3, 9e4, 1e6, 2e6, 3e7, 1e12, 1e30}) {
      for (double sign : {1.0, -1.0}) {
        for (int trend : {0, 1, -1}) {  // scores rise or fall along the keys, or neither
          if (2 * size > largest_number(dtype)) continue;
          Case c;
          c.dtype = dtype, c.L = 19, c.S = 300, c.D = 1, c.scale = 1;
          Workload w(c);
          w.query.fill([] { return 1; });
          for (int64_t j = 0; j < c.S; ++j) {
            const double ramp = trend * size * double(j - c.S / 2) / double(c.S);
            w.key.set({0, j, 0}, w.key.get({0, j, 0}) + sign * size + ramp);
          }
          SCOPED_TRACE(::testing::Message() << c << " size " << sign * size << " trend " << trend);
          expect_close(run_forward(w), forward_truth(w), c);
          if (HasFailure()) return;
        }
      }
    }
  }
}

// The root mean square of the errors is far below the error that expect_close allows one element.
// In f64 the rounding of the reference itself is in it, which adds up one term after the other.
TEST_P(ForwardTest, RoundingErrorIsSmallOnAverage) {
  for (DType dtype : kDTypes) {
    Case c;
    c.dtype = dtype, c.L = 64, c.S = 700, c.D = 64, c.Dv = 64;
    const Workload w(c);
    const Results actual = run_forward(w), expected = forward_truth(w);
    const bool f64 = dtype == DType::f64;
    const double most = is_half(dtype) ? rms_of_rounding(dtype) : f64 ? 2e-15 : 4.5e-7;
    EXPECT_LT(relative_rms_error(actual.output, expected.output), most) << c;
    EXPECT_LT(relative_rms_error(actual.lse, expected.lse), f64 ? 2e-16 : 6e-8) << c;
  }
}

TEST_P(ForwardTest, RowsWithNothingToAttendToAreZero) {
  for (DType dtype : kDTypes) {
    for (MaskType mask : all_masks(dtype)) {
      for (int64_t S : {0, 5, 700}) {
        Case c;
        c.dtype = dtype, c.L = 19, c.S = S, c.mask_type = mask;
        Workload w(c);
        w.mask.fill([&] { return mask == MaskType::boolean ? 0 : -kInf; });
        const Results r = run_forward(w);
        for (double x : r.output) EXPECT_EQ(x, 0);
        for (double x : r.lse) EXPECT_EQ(x, -kInf);
      }
    }
  }
}

// With a size of 0, outputs that have elements are set, and tensors that have none may be null.
void attend_to_nothing(DType dtype) {
  Problem p;
  p.dtype = dtype;
  p.batch_rank = 1, p.batch_sizes = {2};
  p.heads = p.kv_heads = 2, p.seqlen_q = 3, p.seqlen_k = 0, p.head_dim = 4, p.head_dim_v = 4;
  Tensor output(type_of(dtype), {2, 2, 3, 4}, dense_strides({2, 2, 3, 4}));
  Tensor query(type_of(dtype), {2, 2, 3, 4}, dense_strides({2, 2, 3, 4}));
  query.fill([] { return 1; });
  p.query = query.input();
  attention_forward(p, {output.output(), {}});
  for (double x : output.values()) EXPECT_EQ(x, 0);

  p.batch_sizes = {0}, p.query = {};
  attention_forward(p, {});
  p.batch_sizes = {2}, p.heads = p.kv_heads = 0;
  attention_forward(p, {});
  p.heads = p.kv_heads = 2, p.seqlen_q = 0;
  attention_forward(p, {});
}

TEST_P(ForwardTest, NullPointersWhereNothingIs) {
  for (DType dtype : kDTypes) attend_to_nothing(dtype);
}

}  // namespace
}  // namespace qkv::test
