// AVX-512's vectors and AVX512-BF16's instructions, on any CPU.
#pragma once

#ifndef QKV_ISA  // this header is opened by itself (kernels/simd/vec.h)
#include "kernels/prelude.h"
#define QKV_ISA emulated_avx512bf16
#endif

// No register holds such a vector.
#undef QKV_VECTOR_REGISTER
#define QKV_VECTOR_REGISTER "+m"

#include "emulated/flushed.h"

namespace qkv::QKV_ISA {

#if defined(__FP_FAST_FMAF) && defined(__FP_FAST_FMA)
constexpr bool kHasFma = true;
#else
constexpr bool kHasFma = false;
#endif
constexpr int kRegisters = 32;  // those of AVX-512
constexpr int kVectorBytes = 64;
constexpr int kMaxRows[2] = {14, 14};
constexpr int kVectorsInStep = 4;
// Whether there is a native_look_up() (kernels/simd/exp_table.h).
constexpr bool kLooksUp = false;

// vdpbf16ps: the product of the second numbers of two pairs is added first, then that of the first
// numbers. It is not inlined: a micro-kernel unrolls it up to 28 times, and would take minutes to
// compile.
template <class V, class Pairs>
__attribute__((noinline)) V native_dot_pairs(V sum, Pairs a, Pairs b) {
  const Floats seconds = add_product_flushed(second_of(a), second_of(b), (Floats)sum);
  return (V)add_product_flushed(first_of(a), first_of(b), seconds);
}

// vcvtne2ps2bf16, which takes subnormal numbers for zeros, as vdpbf16ps does.
typedef uint16_t Narrow __attribute__((vector_size(kVectorBytes)));
template <class V>
QKV_INLINE Narrow native_narrow(V low, V high) {
  constexpr int kHalf = kVectorBytes / 4;
  const Floats flushed_low = flush((Floats)low), flushed_high = flush((Floats)high);
  Narrow narrow{};
  for (int i = 0; i < kHalf; ++i) {
    narrow[i] = qkv::narrow<BFloat16>(flushed_low[i]).bits;
    narrow[kHalf + i] = qkv::narrow<BFloat16>(flushed_high[i]).bits;
  }
  return narrow;
}

}  // namespace qkv::QKV_ISA

#include "isa/generic/functions.h"
