// The reference on a part of a whole gives what the whole has there, by a definition that is not its
// own: the weights of the whole, in the whole's numbers.
#include <gtest/gtest.h>

#include "cases.h"

namespace qkv::test {
namespace {

// Where a part lies in [H, L, S], and its size.
struct Part {
  int64_t head, query, key, heads, queries, keys;
};

Case case_of(const Case& whole, const Part& part) {
  Case c = whole;
  c.kv_heads = part.heads / c.group, c.L = part.queries, c.S = part.keys;
  c.shard = {.query_offset = part.query, .key_offset = part.key, .head_offset = part.head,
             .seqlen_q = whole.L, .seqlen_k = whole.S, .heads = whole.heads()};
  return c;
}

Workload cut(const Workload& whole, const Part& part) {
  Workload w(case_of(whole.c, part));
  const auto copy = [](Tensor& to, const Tensor& from, int64_t head, int64_t row) {
    for (int64_t h = 0; h < to.sizes()[0]; ++h)
      for (int64_t r = 0; r < to.sizes()[1]; ++r)
        for (int64_t d = 0; d < to.sizes()[2]; ++d)
          to.set({h, r, d}, from.get({head + h, row + r, d}));
  };
  copy(w.query, whole.query, part.head, part.query);
  copy(w.key, whole.key, part.head / whole.c.group, part.key);
  copy(w.value, whole.value, part.head / whole.c.group, part.key);
  if (whole.c.alibi_slopes) copy(w.alibi_slopes, whole.alibi_slopes, part.head, 0);
  return w;
}

// exp(score), dropped or not, for each head, query and key: weight * exp(lse).
std::vector<double> exponentials(const Workload& w) {
  const Results r = run(w, kReference);
  const std::vector<double> before = w.make_weights().values();
  std::vector<double> all(r.weights.size());
  for (size_t n = 0; n < all.size(); ++n) {
    const double lse = r.lse[n / w.c.S];
    all[n] = lse == -kInf ? 0 : (r.weights[n] - before[n]) * std::exp(lse);
  }
  return all;
}

void expect_part_of_whole(const Case& whole) {
  const Workload w(whole);
  const std::vector<double> expected = exponentials(w);
  for (const Part& part : {Part{0, 0, 0, 4, 7, 10}, {2, 2, 3, 2, 4, 5}, {0, 5, 0, 2, 2, 3},
                           {2, 0, 6, 2, 1, 4}, {0, 6, 9, 4, 1, 1}}) {
    const Workload cut_out = cut(w, part);
    SCOPED_TRACE(::testing::Message() << cut_out.c);
    const std::vector<double> found = exponentials(cut_out);
    size_t n = 0;
    for (int64_t h = part.head; h < part.head + part.heads; ++h)
      for (int64_t i = part.query; i < part.query + part.queries; ++i)
        for (int64_t j = part.key; j < part.key + part.keys; ++j, ++n) {
          const double truth = expected[(h * whole.L + i) * whole.S + j];
          EXPECT_NEAR(found[n], truth, 1e-13 * (1 + truth)) << h << ", " << i << ", " << j;
        }
  }
}

TEST(Reference, PartsOfAWhole) {
  Case c = small_case();
  c.kv_heads = c.group = 2, c.L = 7, c.S = 10, c.weights = true;
  c.grad_output = c.grad_lse = c.grad_query = c.grad_key = c.grad_value = false;
  for (bool is_causal : {false, true}) {
    for (int64_t left : {-1, 0, 2}) {
      for (int64_t right : {-1, 0, 4}) {
        c.is_causal = is_causal, c.window_left = left, c.window_right = right;
        expect_part_of_whole(c);
      }
    }
  }
  c.window_left = c.window_right = -1;
  c.alibi_slopes = true;
  expect_part_of_whole(c);
  c.dropout_p = 0.4, c.dropout_batch = 2;
  expect_part_of_whole(c);
}

}  // namespace
}  // namespace qkv::test
