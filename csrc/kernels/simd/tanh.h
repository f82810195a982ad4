// Hyperbolic tangents of vectors, in step as exponentials are (exp.h).
#pragma once

#include "kernels/simd/exp.h"

namespace qkv::QKV_ISA {

// x = tanh(x), at most 4 ulp off, also where x is small. With e = exp(2|x|) - 1 it is e / (e + 2),
// and for small x, where n is 0, e = 2^n (2^r - 1) + (2^n - 1) cancels nothing.
template <class T, int N>
QKV_INLINE void tanh_by_exp(Vec<T> (&x)[N]) {
  using E = Exp2<T>;
  constexpr T kOne = sizeof(T) == 4 ? 20 : 40;  // the 2|x| from which on tanh rounds to 1
  const ShiftedExp<T, 1> by[] = {ShiftedExp<T, 1>(Vec<T>{})};
  const IntVec<T> sign_bit = (IntVec<T>)splat(T(-0.));
  IntVec<T> sign[N];
  Vec<T> r[N], shifted[N], p[N];
  QKV_UNROLL
  for (int i = 0; i < N; ++i) {
    sign[i] = (IntVec<T>)x[i] & sign_bit;
    const Vec<T> twice = (Vec<T>)((IntVec<T>)x[i] ^ sign[i]) * 2;
    r[i] = -max<T>(splat(-kOne), -twice);  // NaN stays NaN
  }
  split_exponent<T>(r, by, shifted);
  polynomial<T>(E::kLess1, r, p);
  QKV_UNROLL
  for (int i = 0; i < N; ++i) {
    const Vec<T> power = (Vec<T>)((IntVec<T>)shifted[i] << E::kMantissaBits);  // 2^n
    const Vec<T> e = p[i] * r[i] * power + (power - 1);
    x[i] = (Vec<T>)((IntVec<T>)(e / (e + 2)) | sign[i]);
  }
}

// tanh(x) / x of x^2 <= kNearZero: a polynomial of x^2, minimax in relative error, off by 4.4e-8.
constexpr float kNearZero = 0.125;
constexpr float kTanhNearZero[] = {1, -3.33326226513e-1f, 1.32985040809e-1f, -4.90565460345e-2f};

// The same, and where all of a step are near 0, as scores are that a soft cap hardly changes, in
// half the time. Which way a lane goes depends on no other, so neither do its bits.
template <class T, int N>
QKV_INLINE void tanh(Vec<T> (&x)[N]) {
  if constexpr (kFixedBits || !std::is_same_v<T, float>) {
    tanh_by_exp<T>(x);
  } else {
    Vec<T> square[N], near[N];
    IntVec<T> far{};
    QKV_UNROLL
    for (int i = 0; i < N; ++i) square[i] = x[i] * x[i];
    polynomial<T>(kTanhNearZero, square, near);
    QKV_UNROLL
    for (int i = 0; i < N; ++i) near[i] *= x[i], far |= square[i] > kNearZero;
    if (or_lanes((IntVec<double>)far)) {
      tanh_by_exp<T>(x);
      QKV_UNROLL
      for (int i = 0; i < N; ++i) near[i] = square[i] > kNearZero ? x[i] : near[i];
    }
    QKV_UNROLL
    for (int i = 0; i < N; ++i) x[i] = near[i];
  }
}

}  // namespace qkv::QKV_ISA
