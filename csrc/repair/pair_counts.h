// Codes (counts.h) in bf16, for products of pairs of bf16. Codes and marks are powers of two, so
// bf16 holds them exactly, and f32 their sums.
#pragma once

#ifndef QKV_ISA  // this header is opened by itself (kernels/simd/vec.h)
#include "isa/avx512bf16/vec.h"
#endif

#include "kernels/gemm/pairs.h"
#include "repair/counts.h"

namespace qkv::QKV_ISA {

QKV_INLINE PairHalves code_in_halves(int code) {
  return PairHalves{} + narrow<BFloat16>(float(code)).bits;
}

// separate_numbers() of counts.h for bf16; `count` is a multiple of kPairHalves.
template <Infinities infinities>
bool separate_numbers(int64_t count, BFloat16* x, BFloat16* codes) {
  const PairHalves exponent = PairHalves{} + 0x7f80;
  PairHalves any{};
  for (int64_t i = 0; i < count; i += kPairHalves) {
    const PairHalves bits = load_halves(x + i);
    const PairHalves special = (PairHalves)((bits & exponent) == exponent);
    PairHalves code = code_in_halves(kNaNCode);
    if constexpr (infinities == Infinities::kept) {
      const PairHalves infinite =
          (bits & 0x8000) != 0 ? code_in_halves(kMinusInfinityCode) : code_in_halves(kInfinityCode);
      code = (bits & 0x7f) != 0 ? code : infinite;
    }
    const PairHalves finite = bits & ~special, coded = code & special;
    std::memcpy(x + i, &finite, sizeof finite);
    std::memcpy(codes + i, &coded, sizeof coded);
    any |= special;
  }
  uint64_t words[sizeof any / sizeof(uint64_t)], some = 0;
  std::memcpy(words, &any, sizeof any);
  for (uint64_t word : words) some |= word;
  return some != 0;
}

}  // namespace qkv::QKV_ISA
