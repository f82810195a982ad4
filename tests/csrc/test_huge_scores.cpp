// Scores so far apart that every weight is 0 or 1. A score of 1e12 in f32 is a multiple of 65536,
// so weights are 0 or 1 in the backward pass only if its scores have the very bits of the forward
// pass's.
#include <gtest/gtest.h>

#include <optional>

#include "cases.h"
#include "reference/head.h"

namespace qkv::test {
namespace {

class HugeScoresTest : public IsaTest {};

QKV_FOR_EACH_ISA(HugeScoresTest);

// The key with the largest score of each row, or -1 if there is none, and that score.
struct Winners {
  std::vector<int64_t> key;
  std::vector<double> score;
};

// The winners of all rows; nothing if in some row the second largest score is so near that rounding
// decides, or that its key has weight.
std::optional<Winners> winners(const Workload& w) {
  const Workload exact = w.in_f64();
  const Problem p = exact.problem();
  Winners all;
  for (int64_t h = 0; h < p.heads; ++h) {
    const reference::Head head(p, 0, h);
    for (int64_t i = 0; i < p.seqlen_q; ++i) {
      double first = -kInf, second = -kInf;
      int64_t key = -1;
      for (int64_t j = 0; j < p.seqlen_k; ++j) {
        if (!head.attends(i, j)) continue;
        const double score = head.score(i, j);
        second = std::max(second, std::min(first, score));
        if (score > first) first = score, key = j;
      }
      if (first - second < std::max(2000., 1e-4 * std::abs(p.scale))) return {};
      all.key.push_back(key), all.score.push_back(first);
    }
  }
  return all;
}

void expect_weights(const Results& r, const Workload& w, const Winners& winners) {
  const std::vector<double> before = w.make_weights().values();
  for (size_t n = 0; n < before.size(); ++n) {
    const bool won = winners.key[n / w.c.S] == int64_t(n % w.c.S);
    const double weight = r.weights[n] - before[n];
    ASSERT_NEAR(weight, won ? 1 : 0, won ? 1e-6 : 0) << "row " << n / w.c.S;
  }
}

void expect_outputs(const Results& r, const Workload& w, const Winners& winners) {
  for (size_t row = 0; row < winners.key.size(); ++row) {
    const int64_t key = winners.key[row], kv_head = int64_t(row) / (w.c.group * w.c.L);
    for (int64_t d = 0; d < w.c.Dv; ++d) {
      const double value = key < 0 ? 0 : w.value.get({kv_head, key, d});
      ASSERT_NEAR(r.output[row * w.c.Dv + d], value, 1e-6 * std::abs(value)) << "row " << row;
    }
    const double score = winners.score[row];
    if (key < 0)
      ASSERT_EQ(r.lse[row], -kInf);
    else
      ASSERT_NEAR(r.lse[row], score, 1e-6 * double(w.c.D) * std::abs(w.c.scale));
  }
}

// grad_value is the sum of grad_output over the rows where a key has won.
void expect_grad_value(const Results& r, const Workload& w, const Winners& winners) {
  std::vector<double> expected(r.grad_value.size());
  for (size_t row = 0; row < winners.key.size(); ++row) {
    const int64_t head = int64_t(row) / w.c.L, kv_head = head / w.c.group;
    if (winners.key[row] < 0) continue;
    for (int64_t d = 0; d < w.c.Dv; ++d)
      expected[(kv_head * w.c.S + winners.key[row]) * w.c.Dv + d] +=
          w.grad_output.get({head, int64_t(row) % w.c.L, d});
  }
  for (size_t n = 0; n < expected.size(); ++n) {
    const double rounding = is_half(w.c.dtype) ? 0x1p-8 * std::abs(expected[n]) : 0;
    ASSERT_NEAR(r.grad_value[n], expected[n], 1e-5 + rounding) << "element " << n;
  }
}

// The gradients of query and key are nothing but the rounding of numbers that cancel. In f16 even
// that may be infinite.
void expect_small_gradients(const Results& r, const Workload& w) {
  const Case& c = w.c;
  const double eps = c.dtype == DType::f64 ? 0x1p-52 : 0x1p-23;
  // The rounding of a number that is at most 3.5, times <grad_output, value - output>.
  const double most = 3.5 * std::abs(c.scale) * 4 * eps * 12 * double(c.Dv);
  for (double x : r.grad_query) ASSERT_LE(std::abs(x), most);
  for (double x : r.grad_key) ASSERT_LE(std::abs(x), most * double(c.L * c.group));
}

Case random_huge_step(Random& random) {
  Case c;
  c.dtype = draw_dtype(random);
  c.kv_heads = draw(random, 1, 2);
  do c.group = draw(random, 1, 16), c.L = draw(random, 1, 16);
  while (c.L * c.group > 16 && draw(random, 0, 19));  // more than 16 rows only now and then
  c.S = draw_from<int64_t>(random, {1, 9, 63, 64, 300, 1100, 2000});
  c.D = draw_from<int64_t>(random, {8, 16, 64, 80, 100, 128});
  c.Dv = draw(random, 0, 1) ? c.D : draw_from<int64_t>(random, {8, 16, 64, 80, 100, 128});
  c.scale = draw_from<double>(random, {1e6, 1e9, 1e12, -1e12});
  if (c.dtype == DType::f64) c.scale *= 1e9;
  c.mask_type = draw(random, 0, 1) ? MaskType::none : draw_mask(random, c.dtype);
  c.is_causal = draw(random, 0, 3) == 0;
  if (draw(random, 0, 3) == 0) c.window_left = draw(random, 0, 700);
  c.num_threads = int(draw(random, 1, 2));
  c.seed = random();
  c.grad_lse = false, c.weights = true;
  c.grad_query = c.grad_key = c.dtype != DType::f16;
  return c;
}

TEST_P(HugeScoresTest, OneKeyWins) {
  auto [n, end] = seeds(5, 100);
  Random random(1 + n);
  while (n < end && !HasFailure()) {
    const Workload w(random_huge_step(random));
    const std::optional<Winners> expected = winners(w);
    if (!expected) continue;
    ++n;
    SCOPED_TRACE(::testing::Message() << w.c);
    const Results r = run(w);
    expect_outputs(r, w, *expected);
    expect_weights(r, w, *expected);
    expect_grad_value(r, w, *expected);
    expect_small_gradients(r, w);
  }
}

}  // namespace
}  // namespace qkv::test
