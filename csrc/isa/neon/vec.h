// NEON, part of every 64-bit Arm CPU: 32 registers of 16 bytes, with FMA.
#pragma once

#ifndef QKV_ISA  // this header is opened first
#include "kernels/prelude.h"
#define QKV_ISA neon
#endif

namespace qkv::QKV_ISA {

constexpr bool kHasFma = true;
constexpr int kRegisters = 32;
constexpr int kVectorBytes = 16;
// 10 x 2 accumulators and two vectors of B leave ten registers for the elements of A: FMLA takes
// one element of a register, and GCC 12 loads them far ahead. With 11 rows accumulators go through
// the stack.
constexpr int kMaxRows[2] = {10, 10};
constexpr int kVectorsInStep = 4;
constexpr bool kLooksUp = false;

// What these functions do, isa/generic/functions.h says. FMAX would keep the NaN of a, and FMAXNM
// the number beside a NaN.
template <class V>
QKV_INLINE V native_max(V a, V b) {
  return a > b ? a : b;
}

QKV_INLINE float32x4_t native_fma(float32x4_t a, float32x4_t b, float32x4_t c) {
  return vfmaq_f32(c, a, b);
}
QKV_INLINE float64x2_t native_fma(float64x2_t a, float64x2_t b, float64x2_t c) {
  return vfmaq_f64(c, a, b);
}

// NEON has no products of 64 bits, so the compiler would take the lanes one by one.
template <class V>
QKV_INLINE V native_mul_low(V a, V b) {
  return (V)vmull_u32(vmovn_u64((uint64x2_t)a), vmovn_u64((uint64x2_t)b));
}

// The compiler takes the bytes one by one.
typedef int32_t Int32 __attribute__((vector_size(kVectorBytes)));
typedef int64_t Int64 __attribute__((vector_size(kVectorBytes)));
QKV_INLINE Int32 native_widen(const uint8_t* p, Int32) {
  uint32_t four;
  std::memcpy(&four, p, 4);
  return (Int32)vmovl_u16(vget_low_u16(vmovl_u8(vcreate_u8(four))));
}
QKV_INLINE Int32 native_widen(const int8_t* p, Int32) {
  uint32_t four;
  std::memcpy(&four, p, 4);
  return (Int32)vmovl_s16(vget_low_s16(vmovl_s8(vcreate_s8(four))));
}
QKV_INLINE Int64 native_widen(const uint8_t* p, Int64) { return Int64{p[0], p[1]}; }

typedef int16_t Words __attribute__((vector_size(kVectorBytes)));
QKV_INLINE Words native_widen(const int8_t* p, Words) { return (Words)vmovl_s8(vld1_s8(p)); }
QKV_INLINE Int32 native_dot_words(Int32 sum, Int32 a, Int32 b) {
  const int16x8_t x = (int16x8_t)a, y = (int16x8_t)b;
  return sum + (Int32)vpaddq_s32(vmull_s16(vget_low_s16(x), vget_low_s16(y)), vmull_high_s16(x, y));
}

typedef uint16_t Half16 __attribute__((vector_size(kVectorBytes / 2)));
QKV_INLINE Int32 native_widen(Half16 x) { return (Int32)vmovl_u16((uint16x4_t)x); }
QKV_INLINE float32x4_t native_widen_f16(Half16 x) { return vcvt_f32_f16((float16x4_t)x); }
QKV_INLINE Half16 native_narrow_f16(float32x4_t x) { return (Half16)vcvt_f16_f32(x); }

}  // namespace qkv::QKV_ISA
