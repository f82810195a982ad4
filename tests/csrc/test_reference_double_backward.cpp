// The second derivatives of the reference against finite differences of its gradients.
#include <gtest/gtest.h>

#include <cmath>

#include "double_workload.h"

namespace qkv::test {
namespace {

class ReferenceDoubleBackward : public ::testing::TestWithParam<Case> {};

TEST_P(ReferenceDoubleBackward, MatchesFiniteDifferences) {
  const double h = 1e-5;  // errs by h^2 times the third derivative, and by 1e-16 / h of rounding
  Case c = GetParam();
  c.grad_alibi_slopes = c.alibi_slopes, c.grad_sinks = c.sinks;
  c.grad_mask = c.grad_mask_keys = c.grad_mask_queries = c.float_mask();
  c.grad_bias = c.bias_type != MaskType::none;
  for (int along : {int(kAlongAll), int(kAlongQuery), int(kAlongKey), int(kAlongValue),
                    int(kAlongMask), int(kAlongBias), int(kAlongSlopes), int(kAlongSinks)}) {
    const JvpWorkload w(c, along);
    SCOPED_TRACE(::testing::Message() << w.c << " along " << along);
    const Results r = run_double(w, kReference, reference::attention_jvp);
    const Results above = run(moved_by(h, w), kReference), below = run(moved_by(-h, w), kReference);
    for (const NamedResult& result : kResults) {
      const std::string name = result.name;
      if (name == "output" || name == "lse") continue;
      const std::vector<double>&x = r.*result.values, &a = above.*result.values,
            &b = below.*result.values;
      ASSERT_EQ(x.size(), a.size()) << name;
      // The gradients of masks are added to what is there.
      const bool adds = name == "grad_mask" || name == "grad_bias";
      const std::vector<double> before = adds ? w.make_grad_mask().values() : std::vector<double>();
      for (size_t n = 0; n < x.size(); ++n)
        EXPECT_NEAR(adds ? x[n] - before[n] : x[n], (a[n] - b[n]) / (2 * h), 4e-8)
            << name << " element " << n;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Cases, ReferenceDoubleBackward, ::testing::ValuesIn(derivative_cases()));

}  // namespace
}  // namespace qkv::test
