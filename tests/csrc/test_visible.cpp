// The ranges of common/visible.h have exactly the keys that each query of the reference sees.
#include "common/visible.h"

#include <gtest/gtest.h>

#include "reference/reference.h"
#include "tensors.h"

namespace qkv::test {
namespace {

void expect_ranges_of_keys_and_queries(const Shard& shard) {
  const Sizes windows = {-1, 0, 1, 3, 20, int64_t{1} << 40};
  for (int64_t L : {1, 2, 7}) {
    for (int64_t S : {1, 2, 7, 12}) {
      for (int64_t left : windows) {
        for (int64_t right : windows) {
          for (bool is_causal : {false, true}) {
            Problem p;
            p.seqlen_q = L, p.seqlen_k = S, p.is_causal = is_causal;
            p.window_left = left, p.window_right = right;
            p.shard = shard;
            SCOPED_TRACE(::testing::Message() << "L " << L << " S " << S << " window " << left
                                              << "," << right << " causal " << is_causal
                                              << " from " << shard.query_offset << ","
                                              << shard.key_offset);
            bool hidden = false;
            for (int64_t i = 0; i < L; ++i) {
              for (int64_t j = 0; j < S; ++j) {
                const bool sees = reference::attends(p, 0, 0, i, j);
                hidden = hidden || !sees;
                EXPECT_EQ(sees, key_begin(p, i) <= j && j < key_end(p, i)) << i << ", " << j;
                if (!sees) continue;
                EXPECT_LE(query_begin(p, j), i);
                EXPECT_GT(query_end(p, j + 1), i);
              }
              EXPECT_LE(0, key_begin(p, i));
              EXPECT_LE(key_begin(p, i), S);
              EXPECT_LE(0, key_end(p, i));
              EXPECT_LE(key_end(p, i), S);
            }
            EXPECT_LE(hidden, hides_positions(p));
          }
        }
      }
    }
  }
}

TEST(Visible, RangesOfKeysAndQueries) { expect_ranges_of_keys_and_queries({}); }

TEST(Visible, InShards) {
  for (int64_t query_offset : {0, 2, 9})
    for (int64_t key_offset : {0, 3, 14})
      expect_ranges_of_keys_and_queries({.query_offset = query_offset, .key_offset = key_offset,
                                         .seqlen_q = 17, .seqlen_k = 26 + query_offset});
}

}  // namespace
}  // namespace qkv::test
