// The kernels keep exactly the weights that philox.h keeps, wherever tiles begin.
#include <gtest/gtest.h>

#include "cases.h"
#include "reference/philox.h"
#include "reference/reference.h"

namespace qkv::test {
namespace {

class DropoutTest : public IsaTest {
 protected:
  // Expects that exactly the weights of kept() in reference/philox.h are not 0. The case has no
  // mask, so that only dropout and positions make a weight 0.
  void expect_exactly_kept(const Case& c) {
    SCOPED_TRACE(::testing::Message() << c);
    const Workload w(c);
    const Problem p = w.problem();
    const Outputs outputs(w);
    attention_forward(p, outputs.forward_result(true));
    const std::vector<double> before = w.make_weights().values();
    const std::vector<double> weights = outputs.values().weights;
    const int64_t heads = c.shard.heads ? c.shard.heads : p.heads;
    int64_t n = 0, wrong = 0;
    for (int64_t b = 0; b < p.batch(); ++b)
      for (int64_t h = 0; h < p.heads; ++h)
        for (int64_t i = 0; i < c.L; ++i)
          for (int64_t j = 0; j < c.S; ++j, ++n) {
            const uint64_t seed =
                c.own_seeds ? uint64_t(kOwnSeeds[b / p.dropout_items]) : p.dropout_seed;
            const int64_t item = c.own_seeds ? b % p.dropout_items : b;
            const bool keep = reference::attends(p, b, h, i, j) &&
                              kept(seed, dropout_threshold(c.dropout_p),
                                   (c.dropout_batch + item) * heads + c.shard.head_offset + h,
                                   c.shard.query_offset + i, c.shard.key_offset + j);
            wrong += keep != (weights[n] != before[n]);
          }
    EXPECT_EQ(wrong, 0);
  }
};

QKV_FOR_EACH_ISA(DropoutTest);

Case weights_case() {
  Case c;
  c.weights = true, c.dropout_p = 0.5, c.scale = 0.01;  // so all weights are about 1 / S
  c.grad_output = c.grad_lse = c.grad_query = c.grad_key = c.grad_value = false;
  return c;
}

TEST_P(DropoutTest, KeepsWhatPhiloxKeeps) {
  for (DType dtype : kDTypes) {
    for (int64_t group : {1, 3, 16}) {
      for (const auto& [L, S] : {std::pair<int64_t, int64_t>{1, 1}, {5, 7}, {70, 130}, {3, 800}}) {
        Case c = weights_case();
        c.dtype = dtype, c.batch = {2}, c.kv_heads = 2, c.group = group, c.L = L, c.S = S;
        c.num_threads = 2, c.seed = uint64_t(L * S);
        expect_exactly_kept(c);
      }
    }
  }
}

// Parts of the batch with seeds of their own drop what they would drop as Problems of their own.
TEST_P(DropoutTest, SeedsOfPartsOfTheBatch) {
  for (DType dtype : kDTypes) {
    for (const auto& [L, S] : {std::pair<int64_t, int64_t>{1, 7}, {40, 70}, {3, 800}}) {
      Case c = weights_case();
      c.dtype = dtype, c.batch = {3, 2}, c.kv_heads = 2, c.group = 2, c.L = L, c.S = S;
      c.own_seeds = true, c.dropout_batch = 4, c.num_threads = 2;
      expect_exactly_kept(c);
    }
  }
}

// In a window, a block of keys may begin anywhere, also within the eight keys of a counter.
TEST_P(DropoutTest, InWindows) {
  for (DType dtype : kDTypes) {
    for (int64_t left = 0; left < 9; ++left) {
      Case c = weights_case();
      c.dtype = dtype, c.L = 90, c.S = 97 + left % 3, c.group = 2;
      c.window_left = left, c.window_right = left % 4, c.is_causal = left % 2;
      expect_exactly_kept(c);
    }
  }
}

// A part of a whole drops what the whole drops there. Its first key may lie anywhere within the
// eight keys of a counter.
TEST_P(DropoutTest, InShards) {
  for (DType dtype : kDTypes) {
    for (int64_t offset = 0; offset < 9; ++offset) {
      Case c = weights_case();
      c.dtype = dtype, c.batch = {2}, c.kv_heads = 2, c.group = 2, c.L = 50, c.S = 70 + offset;
      c.dropout_batch = 3, c.own_seeds = offset % 2;
      c.shard = {.query_offset = 7 * offset,
                 .key_offset = offset,
                 .head_offset = offset,
                 .seqlen_q = 100,
                 .seqlen_k = 90,
                 .heads = 11};
      expect_exactly_kept(c);
    }
  }
}

// The number of a head, batch * H + head, may need more than 32 bits; and probabilities may be so
// small or large that all weights or nearly none are kept.
TEST_P(DropoutTest, FarHeadsAndExtremeProbabilities) {
  for (int64_t batch : {int64_t{0}, int64_t{1} << 31, (int64_t{1} << 32) - 1, int64_t{1} << 50}) {
    for (double p : {1e-12, 0.01, 0.5, 0.999}) {
      Case c = weights_case();
      c.batch = {3}, c.kv_heads = 2, c.L = 20, c.S = 40;
      c.dropout_batch = batch, c.dropout_p = p;
      expect_exactly_kept(c);
    }
  }
}

}  // namespace
}  // namespace qkv::test
