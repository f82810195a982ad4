// The exponential of any number.
#pragma once

#include "kernels/simd/exp.h"

namespace qkv::QKV_ISA {

// x = exp(x) for every x, as accurate as exp2(); 0 where exp(x) would be subnormal.
template <class T, int N>
QKV_INLINE void exp_of(Vec<T> (&x)[N]) {
  // Half of the result fits wherever the result does.
  const ShiftedExp<T> by[] = {ShiftedExp<T>(splat(T(1)))};
  constexpr T kMost = sizeof(T) == 4 ? T(88.7228394) : T(709.782712893384);
  IntVec<T> above[N];
  QKV_UNROLL
  for (int i = 0; i < N; ++i) above[i] = x[i] > kMost;
  QKV_UNROLL
  for (int i = 0; i < N; ++i) x[i] = above[i] ? splat(kMost) : x[i];
  exp<T>(x, by);
  QKV_UNROLL
  for (int i = 0; i < N; ++i) x[i] = above[i] ? splat(kInfinity<T>) : x[i] * 2;
}

// The same of one number, which on no CPU has other bits than a vector's lane: a C library has its
// own. Where exp(x) is subnormal, it is the square of a number that is not.
inline double exp_of_number(double x) {
  const bool is_small = x < -700;
  Vec<double> all[] = {splat(is_small ? x / 2 : x)};
  exp_of<double>(all);
  return is_small ? all[0][0] * all[0][0] : all[0][0];
}

}  // namespace qkv::QKV_ISA
