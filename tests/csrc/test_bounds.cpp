// No kernel touches a byte beside its tensors. In this whole program every tensor lies against a
// page that may not be touched, inputs are read-only while a kernel runs, and every other byte
// around outputs is a canary (tensors.h, and run() in cases.h). The tests of this file go through
// all combinations of sizes and placements.
#include <gtest/gtest.h>

#include "cases.h"

namespace qkv::test {
namespace {

class BoundsTest : public IsaTest {
 protected:
  void expect_truth(Case c) {
    for (bool at_front : {false, true}) {
      c.at_front = at_front;
      test::expect_truth(Workload(c));
    }
  }
};

QKV_FOR_EACH_ISA(BoundsTest);

TEST_P(BoundsTest, SmallSizes) {
  const Sizes sizes = kQuick ? Sizes{1, 7, 16} : Sizes{1, 2, 3, 5, 8, 15, 17, 31};
  Case c;
  for (DType dtype : kDTypes)
    for (int64_t L : sizes)
      for (int64_t S : sizes)
        for (int64_t D : sizes) {
          c.dtype = dtype, c.L = L, c.S = S, c.D = D, c.Dv = (D + 3) % 19 + 1;
          c.at_front = (L + S + D) % 2;
          test::expect_truth(Workload(c));
        }
}

TEST_P(BoundsTest, EveryMask) {
  for (DType dtype : kDTypes) {
    for (MaskType mask : all_masks(dtype)) {
      for (int64_t L : {1, 3, 17}) {
        for (int64_t S : {1, 9, 31, 67}) {
          Case c;
          c.dtype = dtype, c.L = L, c.S = S, c.D = 5, c.Dv = 3, c.group = 2;
          c.mask_type = mask, c.is_causal = (L + S) % 4 == 0;
          expect_truth(c);
        }
      }
    }
  }
}

// Tensors with gaps between rows and columns, without gaps, and broadcast, with any options.
TEST_P(BoundsTest, AnyStrides) {
  for (auto [seed, end] = seeds(15, 250); seed < end && !HasFailure(); ++seed) {
    Random random(seed);
    Case c;
    c.dtype = draw_dtype(random);
    c.seed = seed, c.strided = true, c.batch = {2}, c.kv_heads = 2;
    c.L = draw(random, 1, 40), c.S = draw(random, 1, 40);
    c.D = draw(random, 1, 40), c.Dv = draw(random, 1, 40);
    draw_options(random, c);
    expect_truth(c);
  }
}

}  // namespace
}  // namespace qkv::test
