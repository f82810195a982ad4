// No kernel touches a byte beside its tensors. Every tensor of this whole suite
// lies against a page that may not be touched, inputs are read-only while a
// kernel runs, and every other byte around outputs is a canary (tensors.h,
// run() in cases.h). Here sizes and placements go through all combinations.
#include <gtest/gtest.h>

#include "cases.h"

namespace qkv::test {
namespace {

class BoundsTest : public IsaTest {
 protected:
  void expect_truth(Case c) {
    for (DType dtype : {DType::f32, DType::f64}) {
      for (bool at_front : {false, true}) {
        c.dtype = dtype, c.at_front = at_front;
        SCOPED_TRACE(::testing::Message() << c);
        const Workload w(c);
        expect_close(run(w), truth(w), c);
      }
    }
  }
};

QKV_FOR_EACH_ISA(BoundsTest);

TEST_P(BoundsTest, SmallSizes) {
  const Sizes sizes = kQuick ? Sizes{1, 7, 16} : Sizes{1, 2, 3, 5, 8, 15, 17, 31};
  Case c;
  for (int64_t L : sizes)
    for (int64_t S : sizes)
      for (int64_t D : sizes) {
        c.L = L, c.S = S, c.D = D, c.Dv = (D + 3) % 19 + 1;
        expect_truth(c);
      }
}

TEST_P(BoundsTest, EveryMask) {
  for (MaskType mask : {MaskType::boolean, MaskType::f32, MaskType::f64}) {
    for (int64_t L : {1, 3, 17}) {
      for (int64_t S : {1, 9, 31, 67}) {
        for (bool is_causal : {false, true}) {
          Case c;
          c.L = L, c.S = S, c.D = 5, c.Dv = 3, c.group = 2;
          c.mask_type = mask, c.is_causal = is_causal;
          expect_truth(c);
        }
      }
    }
  }
}

// Rows and columns apart, together, and broadcast, with any options.
TEST_P(BoundsTest, AnyStrides) {
  for (int seed = 0; seed < (kQuick ? 30 : 150) && !HasFailure(); ++seed) {
    Random random(seed);
    Case c;
    c.seed = seed, c.strided = true, c.batch = {2}, c.kv_heads = 2;
    c.L = draw(random, 1, 40), c.S = draw(random, 1, 40);
    c.D = draw(random, 1, 40), c.Dv = draw(random, 1, 40);
    draw_options(random, c);
    expect_truth(c);
  }
}

}  // namespace
}  // namespace qkv::test
