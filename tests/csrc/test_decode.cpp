// A few queries and many keys, as in a decoding step: the keys are split, and all query heads that
// share a key/value head read them together.
#include <gtest/gtest.h>

#include "cases.h"

namespace qkv::test {
namespace {

class DecodeTest : public IsaTest {};

QKV_FOR_EACH_ISA(DecodeTest);

TEST_P(DecodeTest, WhereKeysAreSplit) {
  for (DType dtype : kDTypes) {
    for (int64_t L : {1, 5}) {
      for (int64_t S : {512, 513, 1500, 4097}) {
        Case c;
        c.dtype = dtype, c.group = 3, c.L = L, c.S = kQuick ? S / 4 : S, c.D = 64, c.Dv = 48;
        c.mask_type = S % 2 ? MaskType::boolean : MaskType::none, c.num_threads = 2;
        expect_forward_truth(Workload(c));
      }
    }
  }
}

// One tile of rows where keys and values are more than the cache holds (kNearInputs): its
// products are cut into pieces.
TEST_P(DecodeTest, OneTileFromMemory) {
  for (DType dtype : {DType::f32, DType::bf16, DType::f16}) {
    for (MaskType mask : {MaskType::none, MaskType::boolean}) {
      Case c;
      c.dtype = dtype, c.group = 2, c.L = 9, c.D = 64, c.Dv = 72, c.mask_type = mask;
      c.S = (int64_t(1) << 20) / ((c.D + c.Dv) * size_of(dtype)) + 50;
      expect_forward_truth(Workload(c));
    }
  }
}

// A step of 1 to 16 queries, with 1 to 8 query heads for a key/value head, and head dimensions that
// are a whole number of vectors or not.
Case random_step(Random& random, int64_t most_keys) {
  Case c;
  c.dtype = draw_dtype(random);
  c.batch = Sizes(draw(random, 0, 1), 2);
  c.kv_heads = draw(random, 1, 2);
  c.group = draw_from<int64_t>(random, {1, 2, 4, 8});
  c.L = draw(random, 0, 1) ? draw(random, 1, 16) : draw(random, 1, 2);
  c.S = draw(random, 1, most_keys);
  c.D = draw_from<int64_t>(random, {8, 64, 80, 100, 128});
  c.Dv = draw(random, 0, 2) ? c.D : draw_from<int64_t>(random, {16, 64, 80, 100, 128});
  if (draw(random, 0, 1)) draw_options(random, c);
  c.strided = draw(random, 0, 3) == 0;
  c.at_front = draw(random, 0, 1);
  c.num_threads = int(draw(random, 1, 3));
  return c;
}

double work(const Case& c) {
  return double(c.batch.empty() ? 1 : 2) * double(c.heads() * c.L * c.S * (c.D + c.Dv));
}

// check(c) for steps with caches of up to so many keys, none of which is more than `most` work.
template <class Check>
void for_steps(Random random, int begin, int end, int64_t keys, double most, const Check& check) {
  for (int n = begin; n < end && !::testing::Test::HasFailure(); ++n) {
    Case c;
    do c = random_step(random, keys);
    while (work(c) > most);
    c.seed = uint64_t(n);
    check(c);
  }
}

TEST_P(DecodeTest, Forward) {
  const auto [begin, end] = seeds(3, 40);
  for_steps(Random(1 + begin), begin, end, 4000, kQuick ? 2e6 : 4e6,
            [](const Case& c) { expect_forward_truth(Workload(c)); });
}

TEST_P(DecodeTest, Backward) {
  const auto [begin, end] = seeds(3, 40);
  for_steps(Random(2 + begin), begin, end, 1500, kQuick ? 5e5 : 1e6,
            [](const Case& c) { expect_truth(Workload(c)); });
}

}  // namespace
}  // namespace qkv::test
