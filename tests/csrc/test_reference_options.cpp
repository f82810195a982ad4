// The options of the reference on problems solved by hand.
#include <gtest/gtest.h>

#include <cmath>

#include "cases.h"
#include "reference/philox.h"

namespace qkv::test {
namespace {

// Windows are bottom-right aligned: with L = 3 and S = 5, query 0 stands at key 2.
TEST(Reference, WindowsAverageWhatTheySee) {
  Case c = small_case();
  c.L = 3, c.S = 5, c.D = 1, c.Dv = 1, c.scale = 0;
  c.window_left = 1, c.window_right = 0;
  Workload w(c);
  for (int j = 0; j < 5; ++j) w.value.set({0, j, 0}, j);
  Results r = run(w, kReference);
  for (int i = 0; i < 3; ++i) {
    EXPECT_NEAR(r.output[i], i + 1.5, 1e-14);
    EXPECT_NEAR(r.lse[i], std::log(2.0), 1e-14);
  }
  // With more queries than keys, the first two queries see nothing.
  c.L = 5, c.S = 3, c.window_left = -1;
  const Workload v(c);
  r = run(v, kReference);
  for (int i = 0; i < 5; ++i) EXPECT_DOUBLE_EQ(r.lse[i], i < 2 ? -kInf : std::log(double(i - 1)));
  // is_causal, which is top-left aligned, and a window, which is bottom-right aligned, both apply.
  c.L = 3, c.S = 5, c.is_causal = true, c.window_left = 2, c.window_right = -1;
  const Workload u(c);
  r = run(u, kReference);
  for (int i = 0; i < 3; ++i) EXPECT_NEAR(r.lse[i], 0, 1e-14);  // query i sees key i alone
}

TEST(Reference, SoftcapAlibiAndMaskInThisOrder) {
  Case c = small_case();
  c.L = 1, c.S = 3, c.D = 1, c.Dv = 1, c.scale = 0.5;
  c.softcap = 2, c.alibi_slopes = true, c.mask_type = MaskType::f64;
  Workload w(c);
  w.query.set({0, 0, 0}, 3);
  w.alibi_slopes.set({0, 0, 0}, 0.25);
  double sum = 0, output = 0;
  for (int j = 0; j < 3; ++j) {  // query 0 stands at key 2
    w.key.set({0, j, 0}, j - 0.5), w.mask.set({0, 0, j}, j * 0.125);
    const double score = 2 * std::tanh(0.5 * 3 * (j - 0.5) / 2) - 0.25 * (2 - j) + j * 0.125;
    sum += std::exp(score), output += std::exp(score) * w.value.get({0, j, 0});
  }
  const Results r = run(w, kReference);
  EXPECT_NEAR(r.output[0], output / sum, 1e-14);
  EXPECT_NEAR(r.lse[0], std::log(sum), 1e-14);
}

// Weights are those of softmax(cat([scores, sink])), and 0 where no score is seen.
TEST(Reference, SinksJoinTheDenominatorAlone) {
  Case c = small_case();
  c.L = 1, c.S = 2, c.D = 1, c.Dv = 1, c.scale = 0, c.sinks = true;
  c.mask_type = MaskType::boolean;
  c.grad_sinks = true;
  for (double sink : {-kInf, 0.0, std::log(3.0), kInf, kNaN}) {
    for (int seen : {0, 1, 2}) {
      Workload w(c);
      w.sinks.set({0, 0, 0}, sink);
      for (int j = 0; j < 2; ++j) w.mask.set({0, 0, j}, j < seen), w.value.set({0, j, 0}, 1);
      const Results r = run(w, kReference);
      SCOPED_TRACE(::testing::Message() << "sink " << sink << " seen " << seen);
      if (sink == kInf || std::isnan(sink)) {
        EXPECT_EQ(r.output[0] == 0, seen == 0);
        EXPECT_EQ(std::isnan(r.output[0]), seen > 0);
        EXPECT_EQ(r.lse[0] == sink, seen == 0 && sink == kInf);
        EXPECT_FALSE(std::isfinite(r.lse[0]));
        EXPECT_EQ(r.grad_value[0] == 0, seen == 0);
        if (seen == 0) {
          EXPECT_EQ(r.grad_sinks[0], w.grad_lse.get({0, 0, 0}));
        }
        continue;
      }
      const double sum = seen + std::exp(sink);
      EXPECT_NEAR(r.output[0], sum == 0 ? 0 : seen / sum, 1e-14);
      EXPECT_DOUBLE_EQ(r.lse[0], std::log(sum));
      EXPECT_EQ(r.grad_value[0] == 0, seen == 0);
      if (seen > 0) continue;  // a row that sees no key has the sink for its lse
      EXPECT_EQ(r.grad_sinks[0], sink == -kInf ? 0 : w.grad_lse.get({0, 0, 0}));
    }
  }
}

TEST(Reference, DropoutScalesWhatItKeeps) {
  Case c = small_case();
  c.S = 9, c.weights = true, c.batch = {2}, c.group = 2;
  const Results all = run(Workload(c), kReference);
  c.dropout_p = 0.25, c.dropout_batch = 5;
  const Workload w(c);
  const Results r = run(w, kReference);
  EXPECT_EQ(r.lse, all.lse);
  const std::vector<double> before = w.make_weights().values();
  size_t n = 0;
  for (int b = 0; b < 2; ++b)
    for (int h = 0; h < 2; ++h)
      for (int i = 0; i < c.L; ++i) {
        std::vector<double> output(c.Dv, 0.0);
        for (int j = 0; j < c.S; ++j, ++n) {
          const double weight = r.weights[n] - before[n], full = all.weights[n] - before[n];
          const bool keep =
              kept(w.problem().dropout_seed, uint32_t{1} << 30, (5 + b) * 2 + h, i, j);
          EXPECT_NEAR(weight, keep ? full / 0.75 : 0, 1e-15);
          for (int d = 0; d < c.Dv; ++d) output[d] += weight * w.value.get({b, 0, j, d});
        }
        for (int d = 0; d < c.Dv; ++d)
          EXPECT_NEAR(r.output[((b * 2 + h) * c.L + i) * c.Dv + d], output[d], 1e-14);
      }
}

// A mask that broadcasts gets the sum of its gradients.
TEST(Reference, SharedGradientsAndWeightsAreSums) {
  Case c = small_case();
  c.batch = {2}, c.group = 3, c.L = 5, c.S = 6, c.is_causal = true, c.mask_type = MaskType::f64;
  c.grad_mask = c.grad_mask_keys = c.grad_mask_queries = c.weights = true;
  const Workload w(c);
  const Results each = run(w, kReference);
  const std::vector<double> before = w.make_weights().values();
  const auto at = [&](int b, int h, int i, int j) { return ((b * 3 + h) * 5 + i) * 6 + j; };
  for (int b = 0; b < 2; ++b)
    for (int h = 0; h < 3; ++h) {
      for (int j = 0; j < 6; ++j) {
        double sum = 0;
        for (int i = 0; i < 5; ++i) sum += each.grad_mask[at(b, h, i, j)] - before[at(b, h, i, j)];
        EXPECT_NEAR(each.grad_mask_keys[(b * 3 + h) * 6 + j], sum, 1e-13);
      }
      for (int i = 0; i < 5; ++i) {
        double sum = 0;
        for (int j = 0; j < 6; ++j) sum += each.grad_mask[at(b, h, i, j)] - before[at(b, h, i, j)];
        EXPECT_NEAR(each.grad_mask_queries[(b * 3 + h) * 5 + i], sum, 1e-13);
      }
    }
  c.share_batch = c.share_heads = true;
  const Workload v(c);
  const Results shared = run(v, kReference);
  const std::vector<double> start = v.make_weights().values();
  for (int i = 0; i < 5; ++i)
    for (int j = 0; j < 6; ++j) {
      double mask = v.make_grad_mask().values()[at(0, 0, i, j)];
      for (int b = 0; b < 2; ++b) {
        double weight = start[at(b, 0, i, j)];  // over the heads alone
        for (int h = 0; h < 3; ++h) {
          mask += each.grad_mask[at(b, h, i, j)] - before[at(b, h, i, j)];
          weight += each.weights[at(b, h, i, j)] - before[at(b, h, i, j)];
        }
        EXPECT_NEAR(shared.weights[at(b, 2, i, j)], weight, 1e-13);
      }
      EXPECT_NEAR(shared.grad_mask[at(1, 2, i, j)], mask, 1e-13);
    }
}

}  // namespace
}  // namespace qkv::test
