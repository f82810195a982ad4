// Which weights dropout keeps (reference/philox.h).
#include "reference/philox.h"

#include <gtest/gtest.h>

#include <cmath>

namespace qkv::test {
namespace {

using Words = std::array<uint32_t, 4>;

// The known answers are those of kat_vectors in Random123, the library of Philox's authors.
TEST(Philox, KnownAnswers) {
  const uint32_t ff = 0xffffffff;
  EXPECT_EQ(philox({0, 0, 0, 0}, {0, 0}), (Words{0x5f6fb709, 0x0d893f64, 0x4f121f81, 0x4f730a48}));
  EXPECT_EQ(philox({ff, ff, ff, ff}, {ff, ff}),
            (Words{0x5207ddc2, 0x45165e59, 0x4d8ee751, 0x8c52f662}));
  EXPECT_EQ(philox({0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, {0xa4093822, 0x299f31d0}),
            (Words{0x4dfccaba, 0x190a87f0, 0xc47362ba, 0xb6b5242a}));
}

// The layout of counter and key is fixed: another one would change what every seed keeps.
TEST(Philox, CounterAndKey) {
  const uint64_t seed = 0x299f31d0a4093822;
  const int64_t plane = 0x0370734413198a2e, query = 0x85a308d3, key = int64_t{0x243f6a88} * 8;
  const uint32_t words[] = {0x4dfccaba, 0x190a87f0, 0xc47362ba, 0xb6b5242a,
                            0xcaba4dfc, 0x87f0190a, 0x62bac473, 0x242ab6b5};
  for (int n = 0; n < 8; ++n) {
    EXPECT_TRUE(kept(seed, words[n], plane, query, key + n));
    EXPECT_FALSE(kept(seed, words[n] + 1, plane, query, key + n));
  }
}

TEST(Philox, Threshold) {
  EXPECT_EQ(dropout_threshold(0), 0u);
  EXPECT_EQ(dropout_threshold(std::ldexp(1, -32)), 1u);
  EXPECT_EQ(dropout_threshold(0.25), uint32_t{1} << 30);
  EXPECT_EQ(dropout_threshold(1), 0xffffffffu);
  EXPECT_EQ(dropout_scale(0.75), 4);
  EXPECT_EQ(dropout_scale(1), 0);
}

// The share of weights that are kept, and the share of neighbours in every direction that are both
// kept, are within five standard deviations of what is expected.
TEST(Philox, KeepsIndependently) {
  constexpr int n = 48;  // queries and keys
  for (double p : {0.1, 0.5}) {
    const uint32_t threshold = dropout_threshold(p);
    const auto keep = [&](int s, int b, int i, int j) { return kept(s, threshold, b, i, j); };
    double total = 0, keeps = 0, both[5] = {};
    for (int s = 0; s < 4; ++s)
      for (int b = 0; b < n / 4; ++b)
        for (int i = 0; i < n; ++i)
          for (int j = 0; j < n; ++j) {
            ++total;
            if (!keep(s, b, i, j)) continue;
            ++keeps;
            both[0] += keep(s + 1, b, i, j), both[1] += keep(s, b + 1, i, j);
            both[2] += keep(s, b, i + 1, j), both[3] += keep(s, b, i, j + 1);
            both[4] += keep(s, b, i, j ^ 4);  // of the same word
          }
    const double q = 1 - p;
    EXPECT_NEAR(keeps / total, q, 5 * std::sqrt(p * q / total));
    for (double pairs : both) EXPECT_NEAR(pairs / keeps, q, 5 * std::sqrt(p * q / keeps));
  }
}

}  // namespace
}  // namespace qkv::test
