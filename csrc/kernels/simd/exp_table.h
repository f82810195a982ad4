// Exponentials of f32 with a table in a register, where the instruction set looks up a number for
// each lane at once (kLooksUp in isa/<name>/vec.h):
//
//   2^(t/16) = 2^(n/16) * 2^(r/16), with an integer n and |r| <= 1/2
//
// The lowest four bits of n choose one of sixteen powers, the others are the exponent, and r is so
// small that a polynomial of the third degree does. Of nine instructions for multiply-adds seven
// are left, and those have only two of the four vector units of a Zen 5: an exponential takes 4.4
// cycles a vector there, and by Exp2's polynomial of the sixth degree 5.9. It is more accurate,
// too: off by 1.00 ulp at most, and 1.22 (every f32 of qkv_csrc_tests
// --gtest_filter='*EveryFloat/exp').
#pragma once

#include "kernels/simd/vec.h"

namespace qkv::QKV_ISA {

// Into how many parts an octave is cut: 1, where there is no table, and where bits are fixed, since
// not every instruction set has one.
template <class T>
constexpr int kSteps = kLooksUp && !kFixedBits && std::is_same_v<T, float> ? 16 : 1;

struct ExpTable {
  // The bits of the f32 nearest to 2^(i/16), minus i << 19. So the bits of 2^(n/16) are those of
  // number n % 16, plus n << 19.
  alignas(64) static constexpr uint32_t kPowers[16] = {
      0x3f800000, 0x3f7daac3, 0x3f7b95c2, 0x3f79c3d3, 0x3f7837f0, 0x3f76f532,
      0x3f75fed7, 0x3f75583f, 0x3f7504f3, 0x3f7508a4, 0x3f75672a, 0x3f76248c,
      0x3f7744fd, 0x3f78ccdf, 0x3f7ac0c7, 0x3f7d257d};
  // 2^(r/16) - 1 = r * (c[0] + c[1] * r + c[2] * r^2) for |r| <= 1/2, off by 1.6e-9 at most: by
  // least squares, whose weights were changed until the largest errors were equal (Lawson).
  static constexpr float kLess1[] = {4.332169891667e-2f, 9.3841518769539e-4f, 1.3550326267161e-5f};
  static constexpr float kMagic = 12582912.f;  // 1.5 * 2^23: adding it rounds to an integer
  // The least n, that of the smallest normal number, 2^-126.
  static constexpr float kLeast = -126 * 16;
};

// r = 2^((n + r)/16), where `shifted` is n + kMagic, rounded as the power in the table and again as
// the result; 0 where n is less than kLeast, and NaN for NaN.
template <class T, int N>
QKV_INLINE void finish_by_table(Vec<T> (&r)[N], const Vec<T> (&shifted)[N]) {
  using E = ExpTable;
  typedef uint32_t Bits __attribute__((vector_size(kVectorBytes)));  // their sum may wrap around
  IntVec<T> powers;
  std::memcpy(&powers, E::kPowers, sizeof powers);
  Vec<T> p[N];
  QKV_UNROLL
  for (int i = 0; i < N; ++i) p[i] = r[i] * E::kLess1[2] + E::kLess1[1];
  QKV_UNROLL
  for (int i = 0; i < N; ++i) p[i] = p[i] * r[i] + E::kLess1[0];
  QKV_UNROLL
  for (int i = 0; i < N; ++i) p[i] *= r[i];
  QKV_UNROLL
  for (int i = 0; i < N; ++i) {
    const IntVec<T> n = (IntVec<T>)shifted[i];
    const Vec<T> power = (Vec<T>)((Bits)native_look_up(powers, n) + ((Bits)n << 19));
    r[i] = shifted[i] < E::kMagic + E::kLeast ? Vec<T>{} : power * p[i] + power;
  }
}

}  // namespace qkv::QKV_ISA
