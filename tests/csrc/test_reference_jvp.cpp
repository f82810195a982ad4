// The forward-mode derivatives of the reference against finite differences of its forward pass.
#include <gtest/gtest.h>

#include <cmath>

#include "jvp_workload.h"

namespace qkv::test {
namespace {

class ReferenceJvp : public ::testing::TestWithParam<Case> {};

TEST_P(ReferenceJvp, MatchesFiniteDifferences) {
  const double h = 1e-5;  // errs by h^2 times the third derivative, and by 1e-16 / h of rounding
  for (int along : {int(kAlongAll), int(kAlongQuery), int(kAlongKey), int(kAlongValue),
                    int(kAlongMask), int(kAlongBias), int(kAlongSlopes), int(kAlongSinks)}) {
    const JvpWorkload w(GetParam(), along);
    SCOPED_TRACE(::testing::Message() << w.c << " along " << along);
    const JvpResults r = run_jvp(w, reference::attention_jvp);
    const Results at = run_forward(w, kReference), above = run_forward(moved_by(h, w), kReference),
                  below = run_forward(moved_by(-h, w), kReference);
    for (size_t n = 0; n < r.output.size(); ++n) {
      EXPECT_NEAR(r.output[n], at.output[n], 1e-14);
      EXPECT_NEAR(r.output_jvp[n], (above.output[n] - below.output[n]) / (2 * h), 2e-8) << n;
    }
    for (size_t n = 0; n < r.lse.size(); ++n) {
      if (std::isfinite(at.lse[n]))
        EXPECT_NEAR(r.lse[n], at.lse[n], 1e-14);
      else
        EXPECT_EQ(r.lse[n], at.lse[n]);
      const double slope = r.lse[n] == -kInf ? 0 : (above.lse[n] - below.lse[n]) / (2 * h);
      EXPECT_NEAR(r.lse_jvp[n], slope, 2e-8) << n;
    }
  }
}

}  // namespace

std::vector<Case> derivative_cases() {
  Case plain = small_case();
  plain.batch = {2};
  Case options = plain;
  options.alibi_slopes = options.sinks = true;
  std::vector<Case> cases;
  for (Case c : {plain, options}) {
    std::vector<Case> some(9, c);
    some[1].is_causal = true;
    some[2].mask_type = MaskType::boolean;
    some[3].mask_type = MaskType::f64, some[3].is_causal = true;
    some[4].kv_heads = 2, some[4].group = 3, some[4].key_head_repeat = 2;
    some[5].scale = -1.5, some[5].L = 5, some[5].S = 2;
    some[6].batch = {2, 1, 2}, some[6].mask_type = some[6].bias_type = MaskType::f64;
    some[7].softcap = 0.7, some[7].window_left = 1, some[7].window_right = 0;
    some[8].dropout_p = 0.4, some[8].dropout_batch = 7;
    cases.insert(cases.end(), some.begin(), some.end());
  }
  Case all = options;
  all.mask_type = all.bias_type = MaskType::f64, all.is_causal = true;
  all.L = 5, all.S = 6, all.window_left = 3, all.window_right = 2;
  all.softcap = 1.5, all.dropout_p = 0.3;
  cases.push_back(all);
  return cases;
}

namespace {

INSTANTIATE_TEST_SUITE_P(Cases, ReferenceJvp, ::testing::ValuesIn(derivative_cases()));

}  // namespace
}  // namespace qkv::test
