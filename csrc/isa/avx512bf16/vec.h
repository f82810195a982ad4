// AVX-512 with AVX512-BF16, which multiplies pairs of bf16 in vectors, and rounds f32 to bf16.
#pragma once

#ifndef QKV_ISA  // this header is opened by itself (kernels/simd/vec.h)
#include "kernels/prelude.h"
#define QKV_ISA avx512bf16
#endif

#include "isa/avx512/vec.h"

#define QKV_PAIRS

namespace qkv::QKV_ISA {

// sum + a.first * b.first + a.second * b.second, lane by lane.
template <class V>
QKV_INLINE __m512 native_dot_pairs(__m512 sum, V a, V b) {
  return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b);
}

// The nearest bf16 of the lanes of low, then of those of high.
QKV_INLINE __m512i native_narrow(__m512 low, __m512 high) {
  return (__m512i)_mm512_cvtne2ps_pbh(high, low);
}

}  // namespace qkv::QKV_ISA
