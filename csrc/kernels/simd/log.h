// The logarithm of vectors, for log-sum-exps.
#pragma once

#include "kernels/simd/exp.h"

namespace qkv::QKV_ISA {

// x = log(x) for x >= 0, off by 1 ulp or two; -inf for 0, while inf and NaN stay what they are.
// With x = 2^e * m and m in [sqrt(1/2), sqrt(2)), log(m) = 2 atanh(z) for z = (m-1)/(m+1), and
// |z| <= 0.172. Of the series of atanh the first term that is left out is z^21 / 21 < 5e-18 * z.
template <int N>
QKV_INLINE void log(Vec<double> (&x)[N]) {
  typedef uint64_t UnsignedBits __attribute__((vector_size(kVectorBytes)));
  constexpr uint64_t kHalfRoot = 0x3fe6a09e667f3bcd;  // sqrt(1/2)
  constexpr uint64_t kOne = uint64_t(1023) << 52;     // 1.0
  constexpr uint64_t kMagic = uint64_t(1075) << 52;   // 2^52, whose lowest bits are integers
  QKV_UNROLL
  for (int i = 0; i < N; ++i) {
    // The exponent, biased so that it is positive: AVX2 lacks arithmetic shifts of 64 bits, and
    // conversions.
    const UnsignedBits exponent = ((UnsignedBits)x[i] - kHalfRoot + kOne) >> 52;
    const Vec<double> m = (Vec<double>)((UnsignedBits)x[i] - ((exponent << 52) - kOne));
    const Vec<double> z = (m - 1) / (m + 1), w = z * z;
    Vec<double> series = w * (1. / 19) + 1. / 17;
    series = series * w + 1. / 15;
    series = series * w + 1. / 13;
    series = series * w + 1. / 11;
    series = series * w + 1. / 9;
    series = series * w + 1. / 7;
    series = series * w + 1. / 5;
    series = series * w + 1. / 3;
    series = z + z * w * series;
    const Vec<double> e = (Vec<double>)(exponent | kMagic) - (0x1p52 + 1023);
    const Vec<double> special = x[i] == 0 ? splat(-kInfinity<double>) : x[i];
    x[i] = ((x[i] > 0) & (x[i] < kInfinity<double>)) ? e * kLn2 + (series + series) : special;
  }
}

}  // namespace qkv::QKV_ISA
