// Exponentials of vectors: 2^x = 2^n * 2^r with an integer n and |r| <= 1/2, where a
// polynomial gives 2^r.
//
// Functions take N vectors in step, one operation for all before the next operation: the chain of
// one vector is some 40 cycles long, and one chain after the other would fill the CPU's scheduler
// with instructions that wait (kVectorsInStep in isa/<name>/vec.h).
#pragma once

#include "kernels/simd/exp_table.h"
#include "kernels/simd/vec.h"

namespace qkv::QKV_ISA {

constexpr double kLog2e = 1.4426950408889634074;
constexpr double kLn2 = 0.69314718055994530942;

// The constants for f32 and f64, by name:
//   kCoefficients  the polynomial for 2^r
//   kLess1         the polynomial for (2^r - 1) / r
//   kMagic         adding it rounds a number to an integer n, and leaves n + kBias, the exponent of
//                  2^n, in the lowest bits
//   kLn2High, Low  their sum is log(2), and the first has so few bits that its product with n (in
//                  f32 up to 2^15) is exact (Cody and Waite); for CPUs without FMA
//   kLog2eTail     log2(e) minus its nearest f32 or f64
template <class T>
struct Exp2;

// The polynomials are minimax in relative error on [-1/2, 1/2] (Remez), kCoefficients with a first
// coefficient of 1, so that integers come out exact. They are off by 2.6e-9 and 1.1e-8.
template <>
struct Exp2<float> {
  static constexpr float kCoefficients[] = {1.00000000000e-0f, 6.93147214968e-1f, 2.40226527829e-1f,
                                            5.55031055101e-2f, 9.61769297299e-3f, 1.34066439024e-3f,
                                            1.55946781613e-4f};
  static constexpr float kLess1[] = {6.93147187927e-1f, 2.40226497950e-1f, 5.55035743364e-2f,
                                     9.61823749491e-3f, 1.33907354776e-3f, 1.54035123674e-4f};
  static constexpr int kMantissaBits = 23, kBias = 127;
  static constexpr float kMagic = 12582912.f + kBias;  // 1.5 * 2^23
  static constexpr float kLn2High = 0.693359375f, kLn2Low = -2.12194440055e-4f;
  static constexpr float kLog2eTail = 1.92596299113e-8f;
};

// Polynomials of the same kind. kCoefficients are off by 1.8e-17.
template <>
struct Exp2<double> {
  static constexpr double kCoefficients[] = {
      1.0000000000000000000e-0, 6.9314718055994569675e-1, 2.4022650695910098007e-1,
      5.5504108664790394552e-2, 9.6181291076070023796e-3, 1.3333558153439964747e-3,
      1.5403530441572130330e-4, 1.5252727385193868197e-5, 1.3215442675329822143e-6,
      1.0180647659234138888e-7, 7.0725704128144235096e-9, 4.0780719295883366650e-10};
  static constexpr double kLess1[] = {
      6.931471805599453112e-1,  2.4022650695910097888e-1, 5.5504108664821236534e-2,
      9.6181291076070656693e-3, 1.3333558146531632859e-3, 1.5403530441480679921e-4,
      1.5252733701214656492e-5, 1.321544272423112757e-6,  1.0178121299165704425e-7,
      7.0725617019303205134e-9, 4.4455372281544427333e-10};
  static constexpr int kMantissaBits = 52, kBias = 1023;
  static constexpr double kMagic = 6755399441055744. + kBias;  // 1.5 * 2^52
  static constexpr double kLn2High = 6.93145751953125e-1, kLn2Low = 1.42860682030941723212e-6;
  static constexpr double kLog2eTail = 2.035527374093103e-17;
};

// p = c[0] + c[1] * r + c[2] * r^2 ..., by Horner's scheme.
template <class T, int N, int COUNT>
QKV_INLINE void polynomial(const T (&c)[COUNT], const Vec<T> (&r)[N], Vec<T> (&p)[N]) {
  QKV_UNROLL
  for (int i = 0; i < N; ++i) p[i] = splat(c[COUNT - 1]);
  QKV_UNROLL
  for (int d = COUNT - 2; d >= 0; --d) {
    QKV_UNROLL
    for (int i = 0; i < N; ++i) p[i] = multiply_add<T>(p[i], r[i], splat(c[d]));
  }
}

// r = 2^r * 2^n, where `shifted` is n + kMagic: a shift of its lowest bits to the place of the
// exponent makes 2^n.
template <class T, int N>
QKV_INLINE void finish_exp2(Vec<T> (&r)[N], const Vec<T> (&shifted)[N]) {
  using E = Exp2<T>;
  Vec<T> p[N];
  polynomial<T>(E::kCoefficients, r, p);
  QKV_UNROLL
  for (int i = 0; i < N; ++i) r[i] = p[i] * (Vec<T>)((IntVec<T>)shifted[i] << E::kMantissaBits);
}

// t = 2^t for t <= 127 (f64: 1023), at most 2 ulp off; 0 where 2^t would be subnormal, and NaN for
// NaN.
template <class T, int N>
QKV_INLINE void exp2(Vec<T> (&t)[N]) {
  using E = Exp2<T>;
  Vec<T> shifted[N];
  QKV_UNROLL
  for (int i = 0; i < N; ++i) {
    t[i] = max<T>(splat(T(-E::kBias)), t[i]);
    shifted[i] = t[i] + E::kMagic;
    t[i] -= shifted[i] - E::kMagic;
  }
  finish_exp2<T>(t, shifted);
}

// The constants that make exp(x) / 2^shift of x, for an integer shift in each lane. The shift takes
// no time and rounds nothing, since it is taken off the magic number. Without a table (steps is 1),
// x below `low` gives 0.
template <class T, int steps = kSteps<T>>
struct ShiftedExp {
  static constexpr T kMagic = steps == 1 ? Exp2<T>::kMagic : T(ExpTable::kMagic);
  Vec<T> magic, low;

  ShiftedExp() = default;
  explicit QKV_INLINE ShiftedExp(Vec<T> shift)
      : magic(kMagic - shift * T(steps)), low((shift - T(Exp2<T>::kBias)) * T(kLn2)) {}
};

// x = r and shifted = n + magic for x * log2(e) * steps = n + r, with an integer n and |r| <= 1/2.
// Vector i has the magic of by[i % NV]. Where n is 0, the error of r is relative to x. Without the
// tail of log2(e), r is off by 2e-8 * steps times x more.
template <class T, bool with_tail = true, int steps, int N, int NV>
QKV_INLINE void split_exponent(Vec<T> (&x)[N], const ShiftedExp<T, steps> (&by)[NV],
                               Vec<T> (&shifted)[N]) {
  static_assert(kHasFma || steps == 1);
  constexpr T kHigh = T(kLog2e) * steps, kLow = T(Exp2<T>::kLog2eTail) * steps;
  Vec<T> r[N];
  QKV_UNROLL
  for (int i = 0; i < N; ++i) shifted[i] = multiply_add<T>(x[i], splat(kHigh), by[i % NV].magic);
  QKV_UNROLL
  for (int i = 0; i < N; ++i) r[i] = shifted[i] - by[i % NV].magic;  // the integer
  QKV_UNROLL
  for (int i = 0; i < N; ++i) {
    if constexpr (kHasFma) {
      r[i] = native_fma(x[i], splat(kHigh), -r[i]);
      x[i] = with_tail ? multiply_add<T>(x[i], splat(kLow), r[i]) : r[i];
    } else {
      x[i] -= r[i] * Exp2<T>::kLn2High;  // exact: the product fits
      x[i] = (x[i] - r[i] * Exp2<T>::kLn2Low) * kHigh;
    }
  }
}

// x = exp(x) / 2^shift, vector i with the shift of by[i % NV]. Accuracy and range are those of
// exp2(). Without the tail of log2(e) it is off by 1.4e-8 times x more.
template <class T, bool with_tail = true, int N, int NV>
QKV_INLINE void exp(Vec<T> (&x)[N], const ShiftedExp<T> (&by)[NV]) {
  Vec<T> shifted[N];
  if constexpr (kSteps<T> == 1) {
    QKV_UNROLL
    for (int i = 0; i < N; ++i) x[i] = max<T>(by[i % NV].low, x[i]);
  }
  split_exponent<T, with_tail>(x, by, shifted);
  if constexpr (kSteps<T> == 1)
    finish_exp2<T>(x, shifted);
  else
    finish_by_table<T>(x, shifted);
}

// x = exp(x) for x <= 0, for one operation less: the tail is missing, whose error is large only
// where exp(x) is small. 0 where exp(x) would be subnormal, and NaN for NaN.
template <class T, int N>
QKV_INLINE void exp_of_negative(Vec<T> (&x)[N]) {
  const ShiftedExp<T> by[] = {ShiftedExp<T>(Vec<T>{})};
  exp<T, false>(x, by);
}

}  // namespace qkv::QKV_ISA
