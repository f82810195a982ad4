// AVX2, FMA and F16C: 16 registers of 32 bytes.
#pragma once

#ifndef QKV_ISA  // this header is opened by itself (kernels/simd/vec.h)
#include "kernels/prelude.h"
#define QKV_ISA avx2
#endif

namespace qkv::QKV_ISA {

constexpr bool kHasFma = true;
constexpr int kRegisters = 16;
constexpr int kVectorBytes = 32;
// 6 x 2 = 12 accumulators, two vectors of B and one broadcast of A fill 15 of 16 registers.
constexpr int kMaxRows[2] = {12, 6};
constexpr int kVectorsInStep = 4;
constexpr bool kLooksUp = false;

// What these functions do, isa/generic/functions.h says. The compiler makes a compare and a blend
// of a > b ? a : b.
QKV_INLINE __m256 native_max(__m256 a, __m256 b) { return _mm256_max_ps(a, b); }
QKV_INLINE __m256d native_max(__m256d a, __m256d b) { return _mm256_max_pd(a, b); }

QKV_INLINE __m256 native_fma(__m256 a, __m256 b, __m256 c) { return _mm256_fmadd_ps(a, b, c); }
QKV_INLINE __m256d native_fma(__m256d a, __m256d b, __m256d c) { return _mm256_fmadd_pd(a, b, c); }

// The compiler does not know that the high bits do not matter.
template <class V>
QKV_INLINE V native_mul_low(V a, V b) {
  return (V)_mm256_mul_epu32((__m256i)a, (__m256i)b);
}

// The compiler takes the bytes one by one.
typedef int32_t Int32 __attribute__((vector_size(kVectorBytes)));
typedef int64_t Int64 __attribute__((vector_size(kVectorBytes)));
QKV_INLINE Int32 native_widen(const uint8_t* p, Int32) {
  return (Int32)_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
}
QKV_INLINE Int64 native_widen(const uint8_t* p, Int64) {
  int32_t four;
  std::memcpy(&four, p, 4);
  return (Int64)_mm256_cvtepu8_epi64(_mm_cvtsi32_si128(four));
}
QKV_INLINE Int32 native_widen(const int8_t* p, Int32) {
  return (Int32)_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
}

typedef int16_t Words __attribute__((vector_size(kVectorBytes)));
QKV_INLINE Words native_widen(const int8_t* p, Words) {
  return (Words)_mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
QKV_INLINE Int32 native_dot_words(Int32 sum, Int32 a, Int32 b) {
  return sum + (Int32)_mm256_madd_epi16((__m256i)a, (__m256i)b);
}

// The compiler makes it of halves of the vector.
typedef uint16_t Half16 __attribute__((vector_size(kVectorBytes / 2)));
QKV_INLINE Int32 native_widen(Half16 x) { return (Int32)_mm256_cvtepu16_epi32((__m128i)x); }

QKV_INLINE __m256 native_widen_f16(Half16 x) { return _mm256_cvtph_ps((__m128i)x); }
QKV_INLINE Half16 native_narrow_f16(__m256 x) {
  return (Half16)_mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT);
}

}  // namespace qkv::QKV_ISA
