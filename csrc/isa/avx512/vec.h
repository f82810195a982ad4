// AVX-512 F, BW, DQ, VL: 32 registers of 64 bytes.
#pragma once

#ifndef QKV_ISA  // this header is opened by itself (kernels/simd/vec.h)
#include "kernels/prelude.h"
#define QKV_ISA avx512
#endif

// GCC 12 warns of the undefined operand inside its own intrinsics.
#if !defined(__clang__)
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

namespace qkv::QKV_ISA {

constexpr bool kHasFma = true;
constexpr int kRegisters = 32;
constexpr int kVectorBytes = 64;
// 14 x 2 = 28 accumulators, two vectors of B and one broadcast of A fill 31 of 32 registers.
constexpr int kMaxRows[2] = {14, 14};
constexpr int kVectorsInStep = 4;
// Zen 4, the only CPU of family 19h that has AVX-512, works on a vector as two halves: half a
// vector takes half the time (kHasHalves in kernels/simd/vec.h).
#define QKV_SPLITS_VECTORS __builtin_cpu_is("amdfam19h")

// What these functions do, isa/generic/functions.h says. The compiler makes a compare and a blend
// of a > b ? a : b.
QKV_INLINE __m512 native_max(__m512 a, __m512 b) { return _mm512_max_ps(a, b); }
QKV_INLINE __m512d native_max(__m512d a, __m512d b) { return _mm512_max_pd(a, b); }

QKV_INLINE __m512 native_fma(__m512 a, __m512 b, __m512 c) { return _mm512_fmadd_ps(a, b, c); }
QKV_INLINE __m512d native_fma(__m512d a, __m512d b, __m512d c) { return _mm512_fmadd_pd(a, b, c); }

// The compiler does not know that the high bits do not matter.
template <class V>
QKV_INLINE V native_mul_low(V a, V b) {
  return (V)_mm512_mul_epu32((__m512i)a, (__m512i)b);
}

typedef int32_t Int32 __attribute__((vector_size(kVectorBytes)));
// table[index % 16], lane by lane (kernels/simd/exp_table.h).
constexpr bool kLooksUp = true;
QKV_INLINE Int32 native_look_up(Int32 table, Int32 index) {
  return (Int32)_mm512_permutexvar_epi32((__m512i)index, (__m512i)table);
}

// The compiler takes the bytes one by one.
typedef int64_t Int64 __attribute__((vector_size(kVectorBytes)));
QKV_INLINE Int32 native_widen(const uint8_t* p, Int32) {
  return (Int32)_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
QKV_INLINE Int64 native_widen(const uint8_t* p, Int64) {
  return (Int64)_mm512_cvtepu8_epi64(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
}
QKV_INLINE Int32 native_widen(const int8_t* p, Int32) {
  return (Int32)_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}

typedef int16_t Words __attribute__((vector_size(kVectorBytes)));
QKV_INLINE Words native_widen(const int8_t* p, Words) {
  return (Words)_mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
// By AVX512-VNNI, which all CPUs with AVX-512 have but the first ones; those widen words to f32.
#define QKV_HAS_WORDS __builtin_cpu_supports("avx512vnni")
// Clang asks for the target where this header is compiled by itself, outside of a target region.
__attribute__((target("avx512f"))) QKV_INLINE Int32 native_dot_words(Int32 sum, Int32 a, Int32 b) {
  asm("vpdpwssd %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
  return sum;
}

// The compiler makes it of halves of the vector.
typedef uint16_t Half16 __attribute__((vector_size(kVectorBytes / 2)));
QKV_INLINE Int32 native_widen(Half16 x) { return (Int32)_mm512_cvtepu16_epi32((__m256i)x); }

QKV_INLINE __m512 native_widen_f16(Half16 x) { return _mm512_cvtph_ps((__m256i)x); }
QKV_INLINE Half16 native_narrow_f16(__m512 x) {
  return (Half16)_mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT);
}

}  // namespace qkv::QKV_ISA
