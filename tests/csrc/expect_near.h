// Compares numbers of which it matters only whether they are finite where they are not: derivatives
// with respect to what is not finite.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "case.h"

namespace qkv::test {

// Half a unit in the last place of x in the type in which results are stored.
inline double rounding(DType dtype, double x) {
  if (!is_half(dtype)) return 0;
  return dtype == DType::bf16 ? std::abs(x) * 0x1p-8 + 1e-38 : std::abs(x) * 0x1p-11 + 0x1p-25;
}

inline void expect_near(const char* name, const std::vector<double>& actual,
                        const std::vector<double>& expected, double tolerance, DType stored) {
  ASSERT_EQ(actual.size(), expected.size()) << name;
  int64_t wrong = 0, first = 0;
  for (int64_t n = int64_t(actual.size()) - 1; n >= 0; --n) {
    const double a = actual[n], e = expected[n];
    const bool is_near =
        std::isfinite(a) && std::isfinite(e)
            ? std::abs(a - e) <= tolerance + rounding(stored, std::abs(e) + tolerance)
            : std::isfinite(a) == std::isfinite(e);
    const bool overflows = stored == DType::f16 && std::abs(e) + tolerance >= 65520;
    if (!is_near && !overflows) ++wrong, first = n;
  }
  if (wrong)
    ADD_FAILURE() << name << ": " << wrong << " of " << actual.size() << " are off, first ["
                  << first << "]: " << actual[first] << ", expected " << expected[first] << " +- "
                  << tolerance;
}

}  // namespace qkv::test
