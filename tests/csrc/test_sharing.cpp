// Planes that add to the same elements of grad_mask (csrc/drivers/sharing.h): they add in their
// order whichever thread runs them, and cases are large enough for every way of cutting the work.
#include <gtest/gtest.h>

#include <algorithm>

#include "cases.h"

namespace qkv::test {
namespace {

class SharingTest : public IsaTest {
 protected:
  void expect_sums(Case c) {
    SCOPED_TRACE(::testing::Message() << c);
    Workload w(c);
    const Results one = expect_truth(w);
    for (int num_threads : {2, 4, 7}) {
      w.c.num_threads = num_threads;
      expect_identical(run(w), one);
    }
  }
};

QKV_FOR_EACH_ISA(SharingTest);

Case masked(Sizes batch, int64_t kv_heads, int64_t group, int64_t L, int64_t S) {
  Case c;
  c.batch = batch, c.kv_heads = kv_heads, c.group = group;
  c.L = L, c.S = S, c.D = 16, c.Dv = 8;
  c.mask_type = MaskType::f32;
  c.grad_mask = c.grad_mask_queries = true;
  c.alibi_slopes = c.grad_alibi_slopes = true;
  return c;
}

// The planes are divided into mask groups, whose sums are added at the end.
TEST_P(SharingTest, SmallMaskOfManyPlanes) {
  for (bool share_heads : {false, true}) {
    Case c = masked({kQuick ? 7 : 23}, 3, 1, 29, 31);
    c.share_batch = true, c.share_heads = share_heads;
    expect_sums(c);
    c.dtype = DType::f64, c.mask_type = MaskType::f64;
    expect_sums(c);
    c.dtype = DType::bf16, c.mask_type = MaskType::bf16;
    expect_sums(c);
  }
}

// The planes run one after the other, in rounds, and the keys of each are split.
TEST_P(SharingTest, LargeMaskOfFewPlanes) {
  Case c = masked({2}, 1, 1, kQuick ? 20 : 90, 900);
  c.share_batch = true;
  for (bool is_causal : {false, true}) {
    c.is_causal = is_causal;
    expect_sums(c);
    c.dtype = DType::f64;
    expect_sums(c);
  }
}

// Planes of the same head share, over the batch: one plane of each head runs at a time, and each
// head of a group has elements of its own.
TEST_P(SharingTest, HeadsApart) {
  Case c = masked({2, 2}, 3, 2, kQuick ? 5 : 40, 600);
  c.share_batch = true;
  expect_sums(c);
}

// Query heads at one position add to one element, and so do several planes, whose strips of rows
// would end amid a position if they were as long as for other calls.
TEST_P(SharingTest, StripsThatWouldCutAPosition) {
  for (int64_t group : {3, 5}) {
    Case c = masked({1}, 2, group, kQuick ? 390 / group : 257, 512);
    c.share_heads = true;
    expect_sums(c);
  }
}

// Only the weights are wanted, summed over the heads.
TEST_P(SharingTest, WeightsOverHeads) {
  Case c = masked({2}, 4, 1, kQuick ? 20 : 60, 700);
  c.grad_mask = c.grad_mask_queries = c.grad_alibi_slopes = false;
  c.grad_query = c.grad_key = c.grad_value = c.grad_output = c.grad_lse = false;
  c.weights = c.share_heads = true;
  expect_sums(c);
}

// The first batch item of a batch, as a batch of its own.
Workload first_item(const Workload& batch) {
  Case c = batch.c;
  c.batch = {1};
  Workload one(c);
  const auto copy = [](Tensor& to, const Tensor& from) {
    for (int64_t i = 0; to && i < to.numel(); ++i) to.set(i, from.get(i));
  };
  copy(one.query, batch.query), copy(one.key, batch.key), copy(one.value, batch.value);
  copy(one.mask, batch.mask), copy(one.alibi_slopes, batch.alibi_slopes);
  copy(one.grad_output, batch.grad_output), copy(one.grad_lse, batch.grad_lse);
  return one;
}

// Of all results, only a sum over the batch depends on the batch size.
TEST_P(SharingTest, ABatchOfOneAndTheSameItemAmongFour) {
  for (int64_t S : {40, 300, 900}) {
    for (bool share_batch : {false, true}) {
      Case c = masked({4}, 2, 1, kQuick ? 5 : 40, S);
      c.share_heads = true, c.share_batch = share_batch;
      SCOPED_TRACE(::testing::Message() << c);
      const Workload batch(c);
      const Results all = run(batch);
      Results one = run(first_item(batch));
      if (share_batch) one.grad_mask.clear();
      for (const NamedResult& r : kResults) {
        const std::vector<double>& from = all.*r.values;
        std::vector<double>& item = one.*r.values;
        const auto n = std::ptrdiff_t(item.size());
        EXPECT_TRUE(std::equal(item.begin(), item.end(), from.begin(), from.begin() + n)) << r.name;
      }
    }
  }
}

}  // namespace
}  // namespace qkv::test
