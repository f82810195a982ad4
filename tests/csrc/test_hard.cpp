// attention_hard: the best key of each row, and its value.
#include <gtest/gtest.h>

#include "families.h"
#include "reference/head.h"

namespace qkv::test {
namespace {

class HardTest : public IsaTest {
 protected:
  // Expects that the chosen key has the largest score but for rounding, and that the output is its
  // value, to the bit.
  void expect_best(const Case& c) {
    SCOPED_TRACE(::testing::Message() << c);
    const Workload w(c), exact = w.in_f64();
    const Problem p = exact.problem();
    const Results r = run_hard(w), expected = run_hard(exact, kReference);
    const double eps = c.dtype == DType::f64 ? 1e-14 : 1e-6;
    int64_t row = 0, others = 0;
    for (int64_t b = 0; b < p.batch(); ++b)
      for (int64_t h = 0; h < p.heads; ++h) {
        const reference::Head head(p, b, h);
        for (int64_t i = 0; i < c.L; ++i, ++row) {
          const auto key = int64_t(r.hard_index[row]), best = int64_t(expected.hard_index[row]);
          ASSERT_EQ(key < 0, best < 0) << "row " << row;
          for (int64_t d = 0; d < c.Dv; ++d)
            ASSERT_EQ(r.hard_output[row * c.Dv + d], key < 0 ? 0 : head.value(key, d));
          if (key == best) continue;
          ++others;
          ASSERT_TRUE(head.attends(i, key)) << "row " << row;
          const double top = head.score(i, best);
          ASSERT_NEAR(head.score(i, key), top, eps * (10 * double(c.D) + std::abs(top)));
        }
      }
    EXPECT_LE(others, c.strided ? row : row / 100);  // expanded keys have equal scores
  }
};

QKV_FOR_EACH_ISA(HardTest);

TEST_P(HardTest, RandomCases) {
  for (auto [seed, end] = seeds(7, 100); seed < end && !HasFailure(); ++seed) {
    Case c = random_case(seed + 2000);
    c.sinks = false, c.dropout_p = 0;
    expect_best(c);
  }
}

TEST_P(HardTest, EveryLength) {
  for_every_length(150, [&](const Case& c) { expect_best(c); });
}

// A Workload in which key j has scores[j] in every row, and value j.
Workload with_scores(DType dtype, const std::vector<double>& scores) {
  Case c;
  c.dtype = dtype, c.L = 37, c.S = int64_t(scores.size()), c.D = 1, c.Dv = 1, c.scale = 1;
  Workload w(c);
  w.query.fill([] { return 1; });
  for (int64_t j = 0; j < c.S; ++j)
    w.key.set({0, j, 0}, scores[j]), w.value.set({0, j, 0}, double(j));
  return w;
}

void expect_chosen(const Workload& w, double key) {
  const Results r = run_hard(w);
  EXPECT_EQ(r.hard_index, std::vector<double>(w.c.L, key));
  const double value = key < 0 ? 0 : w.value.get({0, int64_t(key), 0});
  EXPECT_EQ(r.hard_output, std::vector<double>(w.c.L * w.c.Dv, value));
}

TEST_P(HardTest, TheFirstOfEquals) {
  for (DType dtype : kDTypes) {
    expect_chosen(with_scores(dtype, std::vector<double>(700, 0.5)), 0);
    for (int64_t first : {1, 63, 64, 65, 300, 699}) {
      std::vector<double> scores(700, -1);
      for (int64_t j = first; j < 700; j += 7) scores[j] = 3;
      expect_chosen(with_scores(dtype, scores), double(first));
    }
    expect_chosen(with_scores(dtype, {-0.0, 0.0}), 0);
    expect_chosen(with_scores(dtype, {1, kInf, kInf}), 1);
    expect_chosen(with_scores(dtype, {-kInf, -largest_number(dtype), -kInf}), 1);
  }
}

TEST_P(HardTest, NaNCountsAsTheLargest) {
  for (DType dtype : kDTypes) {
    expect_chosen(with_scores(dtype, {1, kNaN, kInf, kNaN}), 1);
    std::vector<double> scores(700, 5);
    scores[600] = scores[650] = kNaN;
    expect_chosen(with_scores(dtype, scores), 600);
  }
}

// Rows whose keys are all masked, hidden by positions, or have scores of -inf.
TEST_P(HardTest, NothingToAttendTo) {
  for (DType dtype : kDTypes) {
    expect_chosen(with_scores(dtype, {}), -1);
    expect_chosen(with_scores(dtype, {-kInf, -kInf}), -1);
    Workload beyond = with_scores(dtype, {1, 2, 3});
    beyond.c.L = 37, beyond.c.S = 3, beyond.c.window_right = 0;
    const Results r = run_hard(beyond);
    for (int64_t i = 0; i < 37; ++i) EXPECT_EQ(r.hard_index[i], i < 34 ? -1 : double(i - 34));
    for (MaskType mask : all_masks(dtype)) {
      Case c;
      c.dtype = dtype, c.L = 19, c.S = 40, c.mask_type = mask;
      Workload w(c);
      w.mask.fill([&] { return mask == MaskType::boolean ? 0 : -kInf; });
      w.key.set({0, 3, 0}, kNaN);  // a masked NaN is not seen either
      w.value.fill([] { return kNaN; });
      expect_chosen(w, -1);
    }
  }
}

}  // namespace
}  // namespace qkv::test
