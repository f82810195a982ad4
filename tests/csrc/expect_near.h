// What is next to a number, and numbers of which it matters only whether they are finite where they
// are not: derivatives with respect to what is not finite.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "case.h"

namespace qkv::test {

inline double largest_finite(const std::vector<double>& all) {
  double most = 0;
  for (double x : all)
    if (std::isfinite(x)) most = std::max(most, std::abs(x));
  return most;
}

// Half a unit in the last place of x in half precision; 0 in any other type.
inline double rounding(DType stored, double x) {
  if (!is_half(stored)) return 0;
  const int digits = stored == DType::bf16 ? 8 : 11, least = stored == DType::bf16 ? -126 : -14;
  int exponent;
  std::frexp(x, &exponent);
  return std::ldexp(1., std::max(exponent - 1, least) - digits);
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
