// The arithmetic of vdpbf16ps (AVX512-BF16) and tdpbf16ps (AMX) on sixteen lanes, on any CPU.
// Both instructions take subnormal numbers for zeros of their sign, those of the sum they add to
// included, and turn subnormal results into zeros; both round each multiply-add once, to the
// nearest, whatever the thread's rounding mode says. Source: Intel's manual of instructions;
// PairsTest.SubnormalsAreZeros and TwinsTest hold the twins, and the hardware where there is
// some, to this to the bit.
#pragma once

#ifndef QKV_ISA  // this header is opened by itself (kernels/simd/vec.h)
#include "kernels/prelude.h"
#define QKV_ISA emulated_avx512bf16
#endif

namespace qkv::QKV_ISA {

typedef float Floats __attribute__((vector_size(64)));
typedef uint32_t FloatBits __attribute__((vector_size(64)));
typedef double Doubles __attribute__((vector_size(128)));

QKV_INLINE Floats flush(Floats x) {
  const FloatBits bits = (FloatBits)x;
  return (Floats)((bits & 0x7f800000) == 0 ? bits & 0x80000000 : bits);
}

// sum + a * b for factors that are bf16. Their product is exact in double; and a sum of numbers
// of 24 and 16 bits that is rounded to double's 53 bits, and then to f32's 24, is what rounding it
// once would make it.
QKV_INLINE Floats add_product_flushed(Floats a, Floats b, Floats sum) {
  const Doubles exact =
      __builtin_convertvector(flush(a), Doubles) * __builtin_convertvector(flush(b), Doubles) +
      __builtin_convertvector(flush(sum), Doubles);
  return flush(__builtin_convertvector(exact, Floats));
}

// The bf16 in the lower and in the upper half of 32 bits; a bf16 is the upper half of an f32.
template <class Pairs>
QKV_INLINE Floats first_of(Pairs pairs) {
  return (Floats)((FloatBits)pairs << 16);
}
template <class Pairs>
QKV_INLINE Floats second_of(Pairs pairs) {
  return (Floats)((FloatBits)pairs & 0xffff0000);
}

}  // namespace qkv::QKV_ISA
