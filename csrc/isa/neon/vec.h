// NEON, part of every 64-bit Arm CPU: 32 registers of 16 bytes, with FMA.
#pragma once

#ifndef QKV_ISA  // this header is opened by itself (kernels/simd/vec.h)
#include "kernels/prelude.h"
#define QKV_ISA neon
#endif

namespace qkv::QKV_ISA {

constexpr bool kHasFma = true;
constexpr int kRegisters = 32;  // for vectors
constexpr int kVectorBytes = 16;
// The most rows of a micro-kernel that is one vector wide, and of one of two. 10 x 2 accumulators
// and two vectors of B leave ten registers for the elements of A: FMLA takes one element of a
// register, and GCC 12 loads them far ahead. With 11 rows accumulators go through the stack.
constexpr int kMaxRows[2] = {10, 10};
// How many vectors' exponentials are computed in step (kernels/simd/exp.h).
constexpr int kVectorsInStep = 4;
// Whether there is a native_look_up() (kernels/simd/exp_table.h).
constexpr bool kLooksUp = false;

// The larger number, lane by lane; that of b if either is NaN. (FMAX would keep the NaN of a, and
// FMAXNM the number beside a NaN.)
template <class V>
QKV_INLINE V native_max(V a, V b) {
  return a > b ? a : b;
}

// a * b + c, rounded once. For steps that must not be rounded twice; elsewhere it is left to the
// compiler to contract a * b + c.
QKV_INLINE float32x4_t native_fma(float32x4_t a, float32x4_t b, float32x4_t c) {
  return vfmaq_f32(c, a, b);
}
QKV_INLINE float64x2_t native_fma(float64x2_t a, float64x2_t b, float64x2_t c) {
  return vfmaq_f64(c, a, b);
}

// For lanes of 64 bits: the products of their low 32 bits. (NEON has no products of 64 bits, so the
// compiler would take the lanes one by one.)
template <class V>
QKV_INLINE V native_mul_low(V a, V b) {
  return (V)vmull_u32(vmovn_u64((uint64x2_t)a), vmovn_u64((uint64x2_t)b));
}

// As many bytes from p as there are lanes, each widened to a lane, signed or not. (The compiler
// takes them one by one.)
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

// IEEE binary16 to f32, and back to the nearest.
typedef uint16_t Half16 __attribute__((vector_size(kVectorBytes / 2)));
QKV_INLINE Int32 native_widen(Half16 x) { return (Int32)vmovl_u16((uint16x4_t)x); }
QKV_INLINE float32x4_t native_widen_f16(Half16 x) { return vcvt_f32_f16((float16x4_t)x); }
QKV_INLINE Half16 native_narrow_f16(float32x4_t x) { return (Half16)vcvt_f16_f32(x); }

}  // namespace qkv::QKV_ISA
