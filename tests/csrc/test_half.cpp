// common/half.h: conversions of bf16 and f16 to f32 and back, against their definitions.
#include "common/half.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "case.h"
#include "random.h"

namespace qkv::test {
namespace {

template <class H>
struct Format;  // the bits of exponent and fraction, which follow one bit of sign
template <>
struct Format<BFloat16> {
  static constexpr int exponent_bits = 8, fraction_bits = 7;
};
template <>
struct Format<Float16> {
  static constexpr int exponent_bits = 5, fraction_bits = 10;
};

// The number that the bits of a half stand for.
template <class H>
double value_of(uint16_t bits) {
  using F = Format<H>;
  const int bias = (1 << (F::exponent_bits - 1)) - 1,
            fraction = bits & ((1 << F::fraction_bits) - 1);
  const int exponent = bits >> F::fraction_bits & ((1 << F::exponent_bits) - 1);
  const double sign = bits >> 15 ? -1 : 1;
  if (exponent == (1 << F::exponent_bits) - 1) return fraction ? std::nan("") : sign * kInf;
  const double significand = exponent ? 1 + std::ldexp(fraction, -F::fraction_bits)
                                      : std::ldexp(fraction, 1 - F::fraction_bits);
  return sign * std::ldexp(significand, exponent ? exponent - bias : -bias);
}

template <class H>
constexpr uint16_t kInfinityBits =
    ((1 << Format<H>::exponent_bits) - 1) << Format<H>::fraction_bits;

bool is_nan_bits(uint16_t bits, uint16_t infinity) { return (bits & 0x7FFF) > infinity; }

template <class H>
class HalfTest : public ::testing::Test {
 protected:
  // Every magnitude in ascending order. The number that would follow the largest one stands for
  // infinity: numbers that are nearest to it are rounded to infinity.
  static std::vector<double> magnitudes() {
    std::vector<double> all;
    for (int bits = 0; bits < kInfinityBits<H>; ++bits) all.push_back(value_of<H>(uint16_t(bits)));
    const size_t n = all.size();
    all.push_back(2 * all[n - 1] - all[n - 2]);
    return all;
  }

  // The half that is nearest to x; of two that are as near, the one with an even last digit.
  uint16_t nearest(float x) const {
    const uint16_t sign = std::signbit(x) ? 0x8000 : 0;
    const double size = std::min(double(std::abs(x)), magnitudes_.back());
    const auto above = std::lower_bound(magnitudes_.begin(), magnitudes_.end(), size);
    const auto n = int(above - magnitudes_.begin());
    if (n == 0 || *above == size) return uint16_t(sign | n);
    const double up = *above - size, down = size - magnitudes_[n - 1];
    return uint16_t(sign | (up < down || (up == down && n % 2 == 0) ? n : n - 1));
  }

  void expect_nearest(float x) const {
    const uint16_t actual = narrow<H>(x).bits, expected = nearest(x);
    ASSERT_EQ(actual, expected) << x << " bits " << std::hex << bits_of(x);
  }

  const std::vector<double> magnitudes_ = magnitudes();
};

using Halves = ::testing::Types<BFloat16, Float16>;
TYPED_TEST_SUITE(HalfTest, Halves);

TYPED_TEST(HalfTest, EveryHalfIsWhatItsBitsSay) {
  for (int n = 0; n < 0x10000; ++n) {
    const auto bits = uint16_t(n);
    const float wide = widen(TypeParam{bits});
    const double expected = value_of<TypeParam>(bits);
    if (is_nan_bits(bits, kInfinityBits<TypeParam>)) {
      ASSERT_TRUE(std::isnan(wide)) << std::hex << n;
    } else {
      ASSERT_EQ(double(wide), expected) << std::hex << n;
      ASSERT_EQ(std::signbit(wide), bits >> 15 == 1) << std::hex << n;
    }
  }
}

TYPED_TEST(HalfTest, ThereAndBack) {
  for (int n = 0; n < 0x10000; ++n) {
    const auto bits = uint16_t(n);
    const uint16_t back = narrow<TypeParam>(widen(TypeParam{bits})).bits;
    if (is_nan_bits(bits, kInfinityBits<TypeParam>))
      ASSERT_TRUE(is_nan_bits(back, kInfinityBits<TypeParam>) && back >> 15 == bits >> 15) << n;
    else
      ASSERT_EQ(back, bits);
  }
}

// Each half, the middle between it and the next, and the floats beside both: these are all the
// places where the nearest half changes, among subnormal numbers and at infinity too.
TYPED_TEST(HalfTest, RoundsToTheNearest) {
  const std::vector<double>& halves = this->magnitudes_;
  for (size_t n = 0; n + 1 < halves.size(); ++n) {
    // Between bf16's smallest numbers the middle is a subnormal float.
    for (const double at : {halves[n], (halves[n] + halves[n + 1]) / 2}) {
      const auto x = float(at);
      ASSERT_EQ(double(x), at);
      for (const float near : {x, std::nextafter(x, float(kInf)), std::nextafter(x, float(-kInf))})
        for (const float each : {near, -near}) this->expect_nearest(each);
    }
    if (this->HasFailure()) return;
  }
}

TYPED_TEST(HalfTest, RoundsFloatsOfAnySize) {
  const uint32_t step = kQuick ? 99991 : 997;  // prime
  for (uint64_t bits = 0; bits <= 0xFFFFFFFF && !this->HasFailure(); bits += step) {
    const float x = float_of_bits(uint32_t(bits));
    if (std::isnan(x))
      ASSERT_TRUE(is_nan_bits(narrow<TypeParam>(x).bits, kInfinityBits<TypeParam>));
    else
      this->expect_nearest(x);
  }
  for (const float x : {std::numeric_limits<float>::max(), float(kInf)}) {
    EXPECT_EQ(narrow<TypeParam>(x).bits,
              x == float(kInf) ? kInfinityBits<TypeParam> : this->nearest(x));
    EXPECT_EQ(narrow<TypeParam>(-x).bits & 0x7FFF, narrow<TypeParam>(x).bits);
  }
}

// A NaN stays NaN whichever of its bits are cut off; its payload and whether it is quiet do not
// matter.
TYPED_TEST(HalfTest, NaNStaysNaN) {
  for (uint32_t sign : {0u, 0x80000000u}) {
    for (int bit = 0; bit < 23; ++bit) {
      const uint16_t half = narrow<TypeParam>(float_of_bits(sign | 0x7F800000 | 1u << bit)).bits;
      EXPECT_TRUE(is_nan_bits(half, kInfinityBits<TypeParam>)) << "payload bit " << bit;
      EXPECT_EQ(half >> 15, sign >> 31);
    }
    EXPECT_TRUE(is_nan_bits(narrow<TypeParam>(float_of_bits(sign | 0x7FFFFFFF)).bits,
                            kInfinityBits<TypeParam>));
  }
}

// The compiler's own binary16, where it has one.
#if defined(__aarch64__)
using CompilersHalf = __fp16;
#define QKV_COMPILER_HAS_HALF
#elif defined(__FLT16_MANT_DIG__)
using CompilersHalf = _Float16;
#define QKV_COMPILER_HAS_HALF
#endif
#if defined(QKV_COMPILER_HAS_HALF)
TEST(Float16Test, AgreesWithTheCompiler) {
  const uint32_t step = kQuick ? 100003 : 1009;  // prime
  for (uint64_t bits = 0; bits <= 0xFFFFFFFF; bits += step) {
    const float x = float_of_bits(uint32_t(bits));
    if (std::isnan(x)) continue;
    const auto theirs = static_cast<CompilersHalf>(x);
    uint16_t their_bits;
    std::memcpy(&their_bits, &theirs, 2);
    ASSERT_EQ(narrow<Float16>(x).bits, their_bits) << x;
    ASSERT_EQ(widen(Float16{their_bits}), float(theirs)) << x;
  }
}
#endif

}  // namespace
}  // namespace qkv::test
