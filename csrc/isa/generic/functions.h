// The native_ functions that an instruction set's vec.h must have, made of nothing but the
// compiler's vector extensions, for vectors of any size.
#pragma once

#ifndef QKV_ISA  // this header is opened by itself (kernels/simd/vec.h)
#include "isa/generic/vec.h"
#endif
#include "kernels/fixed_bits.h"

namespace qkv::QKV_ISA {

// The larger number, lane by lane; that of b if either is NaN.
template <class V>
QKV_INLINE V native_max(V a, V b) {
  return a > b ? a : b;
}

// a * b + c, rounded once, for steps that must not be rounded twice: kernels call it only where
// kHasFma, and there the compiler contracts it, or where it must not contract (kFixedBits). All
// other sums of products are left to the compiler.
template <class V>
QKV_INLINE V native_fma(V a, V b, V c) {
  if constexpr (!kFixedBits) return a * b + c;
  QKV_UNROLL
  for (size_t i = 0; i < sizeof(V) / sizeof(a[0]); ++i)
    c[i] = sizeof(a[0]) == 4 ? __builtin_fmaf(a[i], b[i], c[i]) : __builtin_fma(a[i], b[i], c[i]);
  return c;
}

// For lanes of 64 bits: the products of their low 32 bits.
template <class V>
QKV_INLINE V native_mul_low(V a, V b) {
#if defined(__SSE2__)
  if constexpr (sizeof(V) == 16) return (V)_mm_mul_epu32((__m128i)a, (__m128i)b);
#endif
  return (a & 0xffffffff) * (b & 0xffffffff);
}

// As many bytes from p as `wide` has lanes, each widened to a lane, signed or not.
template <class Byte, class I>
QKV_INLINE I native_widen(const Byte* p, I wide) {
  QKV_UNROLL
  for (size_t i = 0; i < sizeof(wide) / sizeof(wide[0]); ++i) wide[i] = p[i];
  return wide;
}

// sum + a.first * b.first + a.second * b.second, lane by lane: a lane of a and of b is a pair of
// words, numbers of 16 bits.
template <class V>
QKV_INLINE V native_dot_words(V sum, V a, V b) {
#if defined(__SSE2__)
  if constexpr (sizeof(V) == 16) return sum + (V)_mm_madd_epi16((__m128i)a, (__m128i)b);
#endif
  return sum + (a << 16 >> 16) * (b << 16 >> 16) + (a >> 16) * (b >> 16);
}

typedef uint16_t Half16 __attribute__((vector_size(kVectorBytes / 2)));
typedef uint32_t Bits32 __attribute__((vector_size(kVectorBytes)));
typedef float Float32 __attribute__((vector_size(kVectorBytes)));
typedef int32_t Int32 __attribute__((vector_size(kVectorBytes)));
typedef int16_t Words __attribute__((vector_size(kVectorBytes)));
// Every lane zero-extended.
QKV_INLINE Int32 native_widen(Half16 x) { return __builtin_convertvector(x, Int32); }
// IEEE binary16 to f32, and back to the nearest, as common/half.h does it, in every lane.
QKV_INLINE Float32 native_widen_f16(Half16 x) {
  const Bits32 bits = __builtin_convertvector(x, Bits32), magnitude = bits & 0x7fff;
  const Bits32 special = 0x7f800000 | (magnitude & 0x3ff) << 13;
  const Bits32 value = (Bits32)((Float32)(magnitude << 13) * 0x1p112f);
  return (Float32)((bits & 0x8000) << 16 | (magnitude >= 0x7c00 ? special : value));
}
QKV_INLINE Half16 native_narrow_f16(Float32 x) {
  const Bits32 bits = (Bits32)x, magnitude = bits & 0x7fffffff;
  const Bits32 subnormal = (Bits32)((Float32)magnitude + 0.5f) - 0x3f000000;
  const Bits32 normal = (magnitude - 0x38000000 + 0xfff + (magnitude >> 13 & 1)) >> 13;
  const Bits32 infinite = Bits32{} + 0x7c00, nan = Bits32{} + 0x7e00;
  Bits32 half = magnitude < 0x38800000 ? subnormal : normal;
  half = magnitude >= 0x477ff000 ? infinite : half;
  half = magnitude > 0x7f800000 ? nan : half;
  return __builtin_convertvector(half | (bits >> 16 & 0x8000), Half16);
}

}  // namespace qkv::QKV_ISA
