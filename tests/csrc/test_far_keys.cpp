// Keys so far out that 32 bits, or an f32, do not hold their numbers. They are all one row of
// memory, with a stride of 0, and a window or is_causal lets few of them be seen, so that these
// tests need neither memory nor time.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "attention_jvp.h"
#include "cases.h"
#include "reference/philox.h"

namespace qkv::test {
namespace {

class FarKeys : public IsaTest {};

QKV_FOR_EACH_ISA(FarKeys);

constexpr int64_t kRows = 37, kLeft = 3;
constexpr int64_t kFar = (int64_t{1} << 31) + 8;

// A Workload with one key and one value that stand for S of them. Scores are 0, but for ALiBi.
Workload one_key(DType dtype, int64_t rows) {
  Case c;
  c.dtype = dtype, c.L = rows, c.S = 1, c.D = 4, c.Dv = 4, c.alibi_slopes = true;
  Workload w(c);
  w.key.fill([] { return 0; });
  w.value.fill([] { return 1; });
  return w;
}

Problem far_problem(const Workload& w, int64_t keys) {
  Problem p = w.problem();
  p.seqlen_k = keys;
  p.key.strides.row = p.value.strides.row = 0;
  return p;
}

TEST_P(FarKeys, HardAttentionNamesTheKey) {
  for (DType dtype : kDTypes) {
    Workload w = one_key(dtype, kRows);
    for (double slope : {1, -1}) {  // the best key is the last that is seen, or the first
      w.alibi_slopes.set(0, slope);
      for (int64_t keys : {kFar, (int64_t{1} << 40) + 1}) {
        Problem p = far_problem(w, keys);
        p.window_left = kLeft, p.window_right = 0;
        std::vector<int64_t> index(kRows);
        Output output{index.data(), {}};
        output.strides.row = 1;
        attention_hard(p, {{}, output});
        for (int64_t i = 0; i < kRows; ++i)
          EXPECT_EQ(index[size_t(i)], i + keys - kRows - (slope > 0 ? 0 : kLeft)) << dtype;
      }
    }
  }
}

// Scores are those of keys that are near, since only distances matter.
TEST_P(FarKeys, TheWindowIsWhereItWouldBe) {
  for (DType dtype : kDTypes) {
    Workload w = one_key(dtype, kRows);
    w.alibi_slopes.set(0, 0.25);
    std::vector<double> lse[2];
    for (int far = 0; far < 2; ++far) {
      Problem p = far_problem(w, far ? kFar : kRows);
      p.window_left = kLeft, p.window_right = 0;
      const Tensor to(w.compute_element(), {1, kRows, 1}, {kRows, 1, 1});
      attention_forward(p, {{}, to.output()});
      lse[far] = to.values();
    }
    // With near keys, the first rows have none on their left.
    for (int64_t i = kLeft; i < kRows; ++i) EXPECT_EQ(lse[1][i], lse[0][i]) << dtype;
    for (int64_t i = 0; i < kLeft; ++i) EXPECT_EQ(lse[1][i], lse[0][kLeft]) << dtype;
  }
}

// The derivatives of queries whose window stands among so many keys are those of near keys, and
// take the time of these.
TEST_P(FarKeys, DerivativesTakeTheTimeOfTheWindow) {
  constexpr int64_t kQueries = 300;
  for (DType dtype : kDTypes) {
    Case c;
    c.dtype = dtype, c.L = kQueries, c.S = 1, c.D = 4, c.Dv = 4, c.sinks = true;
    const Workload w(c);
    std::vector<double> found[2];
    for (int far = 0; far < 2; ++far) {
      Problem p = far_problem(w, far ? int64_t{1} << 34 : kQueries);
      p.window_left = kLeft, p.window_right = 0;
      const auto rows = [&](Type type, int64_t columns) {
        return Tensor(type, {1, kQueries, columns}, {kQueries * columns, columns, 1});
      };
      const Type element = type_of(dtype), compute = w.compute_element();
      Tensor output = rows(element, 4), lse = rows(compute, 1), output_jvp = rows(element, 4);
      Tensor lse_jvp = rows(compute, 1), grad_query = rows(element, 4), change = rows(element, 4);
      attention_forward(p, {output.output(), lse.output()});
      JvpArgs along;
      along.query = w.grad_output.input();  // any numbers
      attention_jvp(p, along, {{}, {}, output_jvp.output(), lse_jvp.output()});
      BackwardArgs a;
      a.output = output.input(), a.lse = lse.input(), a.grad_output = w.grad_output.input();
      a.grad_query = grad_query.output();
      attention_backward(p, a);
      const BackwardDirection direction{along, output_jvp.input(), lse_jvp.input()};
      a.direction = &direction, a.grad_query = change.output();
      attention_backward(p, a);
      for (const Tensor* t : {&grad_query, &change, &output_jvp})
        for (int64_t i = kLeft * 4; i < kQueries * 4; ++i) found[far].push_back(t->get(i));
    }
    for (size_t i = 0; i < found[0].size(); ++i)
      EXPECT_NEAR(found[1][i], found[0][i], is_half(dtype) ? 1e-2 : 1e-6) << dtype << " " << i;
    EXPECT_TRUE(std::any_of(found[1].begin(), found[1].end(), [](double x) { return x != 0; }));
  }
}

// f32 does not have all distances beyond 2^24; the scores are as good as f32 can make them.
TEST_P(FarKeys, AlibiBeyondWhatF32Counts) {
  constexpr int64_t kQueries = 200, kKeys = (int64_t{1} << 24) + 1001;
  constexpr double kSlope = 1. / 1024;
  for (DType dtype : kDTypes) {
    Workload w = one_key(dtype, kQueries);
    w.alibi_slopes.set(0, kSlope);
    Problem p = far_problem(w, kKeys);
    p.is_causal = true;  // query i sees keys 0 to i, of which the last is nearest
    const Tensor to(w.compute_element(), {1, kQueries, 1}, {kQueries, 1, 1});
    attention_forward(p, {{}, to.output()});
    double sum = 0;
    for (int64_t i = 0; i < kQueries; ++i) {
      sum += std::exp(kSlope * double(i));
      const double expected = std::log(sum) - kSlope * double(i + kKeys - kQueries);
      // A unit in the last place of scores of 2^14 is 2^-9.
      EXPECT_NEAR(to.get(i), expected, dtype == DType::f64 ? 1e-9 : 0x1p-8) << dtype << " " << i;
    }
  }
}

TEST_P(FarKeys, DropoutCountsThemAll) {
  for (DType dtype : kDTypes) {
    const Workload w = one_key(dtype, kRows);
    for (int64_t keys : {kFar, kMaxDropoutKeys}) {
      Problem p = far_problem(w, keys);
      p.by_head[kAlibiSlopes] = {}, p.dropout_p = 0.5;
      p.window_left = kLeft, p.window_right = 0;
      const Tensor to(type_of(dtype), {1, kRows, 4}, {kRows * 4, 4, 1});
      attention_forward(p, {to.output(), {}});
      const uint32_t threshold = dropout_threshold(p.dropout_p);
      for (int64_t i = 0; i < kRows; ++i) {
        double of_four = 0;
        for (int64_t j = i + keys - kRows - kLeft; j <= i + keys - kRows; ++j)
          of_four += kept(p.dropout_seed, threshold, 0, i, j);
        EXPECT_NEAR(to.get({0, i, 0}), of_four / 4 / (1 - p.dropout_p), 1e-6) << dtype << " " << i;
      }
    }
  }
}

// There are so many keys that the index of the best one is counted in several pieces.
TEST_P(FarKeys, HardAttentionOverManyKeys) {
  constexpr int64_t kKeys = 50000;
  const auto best_of = [](DType dtype, auto score) {
    Case c;
    c.dtype = dtype, c.L = 5, c.S = kKeys, c.D = 1, c.Dv = 1, c.scale = 1;
    Workload w(c);
    w.query.fill([] { return 1; });
    for (int64_t j = 0; j < kKeys; ++j) w.key.set({0, j, 0}, score(j));
    w.value.fill([at = 0]() mutable { return at++ % 101; });
    return run_hard(w);
  };
  for (DType dtype : {DType::f32, DType::f64, DType::bf16}) {
    for (int64_t first : {0, 16379, 16380, 16383, 16384, 16385, 32759, 40000, 49999}) {
      const Results r =
          best_of(dtype, [&](int64_t j) { return j >= first && (j - first) % 7 == 0 ? 3. : -1.; });
      EXPECT_EQ(r.hard_index, std::vector<double>(5, double(first))) << dtype;
      EXPECT_EQ(r.hard_output, std::vector<double>(5, double(first % 101))) << dtype;
    }
    const Results nan = best_of(dtype, [](int64_t j) { return j == 20000 ? kNaN : j % 3; });
    EXPECT_EQ(nan.hard_index, std::vector<double>(5, 20000)) << dtype;
    const Results none = best_of(dtype, [](int64_t) { return -kInf; });
    EXPECT_EQ(none.hard_index, std::vector<double>(5, -1)) << dtype;
  }
}

}  // namespace
}  // namespace qkv::test
