// Sine and cosine of vectors of double of any size, with the same bits on every CPU where bits are
// fixed: a C library has its own.
#pragma once

#include "kernels/simd/exp.h"

namespace qkv::QKV_ISA {

// x = quarters * pi/2 + high + low, where |high| is pi/4 at most, but for rounding, and low is far
// smaller. Only the two lowest bits of quarters matter.
struct Angle {
  int64_t quarters;
  double high, low;
};

// The bits of 2/pi behind 64 zeros, before its binary point.
constexpr uint64_t kTwoOverPiBits[] = {
    0x0000000000000000, 0xa2f9836e4e441529, 0xfc2757d1f534ddc0, 0xdb6295993c439041,
    0xfe5163abdebbc561, 0xb7246e3a424dd2e0, 0x06492eea09d1921c, 0xfe1deb1cb129a73e,
    0xe88235f52ebb4484, 0xe99c7026b45f7e41, 0x3991d639835339f4, 0x9c845f8bbdf9283b,
    0x1ff897ffde05980f, 0xef2f118b5a0a6d1f, 0x6d367ecf27cb09b7, 0x4f463f669e5fea2d,
    0x7527bac7ebe5f17b, 0x3d0739f78a5292ea, 0x6bfb5fb11f8d5d08, 0x56033046fc7b6bab};

// The angle of one number of at least kNear, in integers (Payne and Hanek): of 2/pi, bits that make
// multiples of 4 with x are left out, and so are those below the 128th of x * 2/pi mod 4. No double
// is nearer to a multiple of pi/2 than 2^-62, so 64 bits are left.
inline Angle far_angle(double x) {
  __extension__ typedef unsigned __int128 Wide;
  constexpr uint64_t kHalfPi = 0xc90fdaa22168c235;  // * 2^-63
  constexpr uint64_t kMantissa = (uint64_t(1) << 52) - 1, kHigh = (uint64_t(1) << 53) - 1;
  if (!(std::abs(x) < kInfinity<double>)) return {0, x - x, 0};
  uint64_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  const int exponent = int(bits >> 52 & 0x7ff) - 1075;
  const uint64_t number = (bits & kMantissa) | (kMantissa + 1);
  const auto word = [&](int n) {
    const uint64_t* const at = kTwoOverPiBits + (exponent + 62) / 64 + n;
    return uint64_t(((Wide(at[0]) << 64 | at[1]) << ((exponent + 62) % 64)) >> 64);
  };
  const Wide middle = Wide(number) * word(1) + uint64_t(Wide(number) * word(2) >> 64);
  const Wide product = (Wide(number) * word(0) << 64) + middle;  // * 2^-126
  const int64_t quarters = int64_t(product >> 126) + int64_t(product >> 125 & 1);
  const Wide rest = product << 2;  // a fraction with a sign
  const bool is_negative = rest >> 127 & 1;
  Wide left = is_negative ? -rest : rest;
  const int shift = __builtin_clzll(uint64_t(left >> 64));
  left = Wide(uint64_t(left << shift >> 64)) * kHalfPi;
  const double unit = std::ldexp(is_negative != (x < 0) ? -1 : 1, -52 - shift);
  return {x < 0 ? -quarters : quarters, unit * double(uint64_t(left >> 75)),
          unit * 0x1p-53 * double(uint64_t(left >> 22) & kHigh)};
}

// Up to this size, the product of any number of quarters and one of the first three parts of pi/2,
// of 33 bits each, is exact (Cody and Waite), with or without FMA.
constexpr double kNear = 0x1p20;
constexpr double kHalfPiParts[] = {0x1.921fb544p0, 0x1.0b4611a6p-34, 0x1.3198a2ep-69,
                                   0x1.b839a252049c1p-104};
// Minimax polynomials (fdlibm) in z = x^2: sin(x) = x + kThird * x * z + x * z * z * kSine(z), off
// by 2^-58, and cos(x) = 1 - z / 2 + z * z * kCosine(z).
constexpr double kThird = -1.66666666666666324348e-01;
constexpr double kSine[] = {8.33333333332248946124e-03, -1.98412698298579493134e-04,
                            2.75573137070700676789e-06, -2.50507602534068634195e-08,
                            1.58969099521155010221e-10};
constexpr double kCosine[] = {4.16666666666666019037e-02, -1.38888888888741095749e-03,
                              2.48015872894767294178e-05, -2.75573143513906633035e-07,
                              2.08757232129817482790e-09, -1.13596475577881948265e-11};

// a + b = the result + error, exactly.
QKV_INLINE Vec<double> two_sum(Vec<double> a, Vec<double> b, Vec<double>& error) {
  const Vec<double> sum = a + b, of_b = sum - a;
  error = (a - (sum - of_b)) + (b - of_b);
  return sum;
}

// a * b - product, which was rounded. Without FMA it stays unknown, which costs 0.2 ulp.
QKV_INLINE Vec<double> lost(Vec<double> a, Vec<double> b, Vec<double> product) {
  if constexpr (kHasFma) return native_fma(a, b, -product);
  return Vec<double>{};
}

// sin(x + quarters * pi/2), off by 0.62 ulp.
QKV_INLINE Vec<double> sine(Vec<double> x, int64_t quarters) {
  constexpr double kMagic = 0x1.8p52;  // whose lowest bits are integers
  const Vec<double> shifted = x * 0x1.45f306dc9c883p-1 + kMagic, n = shifted - kMagic;
  IntVec<double> quarter = (IntVec<double>)shifted;
  Vec<double> low, high = two_sum(x - n * kHalfPiParts[0], -(n * kHalfPiParts[1]), low);
  high = two_sum(high, low - n * kHalfPiParts[2], low);
  low -= n * kHalfPiParts[3];
  const IntVec<double> far = (x > kNear) | (x < -kNear);
  if (or_lanes(far)) {
    for (int l = 0; l < kLanes<double>; ++l) {
      if (!far[l]) continue;
      const Angle angle = far_angle(x[l]);
      quarter[l] = angle.quarters, high[l] = angle.high, low[l] = angle.low;
    }
  }
  const Vec<double> z = high * high, of_z[] = {z}, z_lost = lost(high, high, z);
  Vec<double> s[1], c[1];
  polynomial<double>(kSine, of_z, s);
  polynomial<double>(kCosine, of_z, c);
  const Vec<double> half = z / 2, most = 1 - half, cube = z * high, third = cube * kThird;
  const Vec<double> cube_lost = lost(z, high, cube) + high * z_lost;
  const Vec<double> third_lost = lost(cube, splat(kThird), third) + cube_lost * kThird;
  const Vec<double> sum = high + third, rest = low - half * low + cube * z * s[0];
  s[0] = sum + ((high - sum + third) + (third_lost + rest));
  c[0] = most + ((1 - most - half) + (z * z * c[0] - high * low - z_lost / 2));
  quarter += quarters;
  s[0] = x == 0 ? x : s[0];  // -0
  const Vec<double> result = (quarter & 1) != 0 ? c[0] : s[0];
  return (Vec<double>)((IntVec<double>)result ^ (quarter & 2) << 62);
}

}  // namespace qkv::QKV_ISA
