// The table of an instruction set that multiplies pairs.
#pragma once

#ifndef QKV_ISA  // this header is opened by itself (kernels/simd/vec.h)
#include "isa/avx512bf16/vec.h"
#endif

#include "kernels/entry.h"
#include "kernels/gemm/gemm.h"
#include "kernels/operands/operand.h"
#include "kernels/score/pair_softmax.h"

namespace qkv::QKV_ISA {

inline void pair_gemm_entry(int64_t rows, int64_t columns, int64_t depth, const Pair* a,
                            int64_t a_row, int64_t a_col, const Pair* b, int64_t b_row, float* c,
                            int64_t c_row, int beta, const float* lanes, float alpha) {
  const PairUnit unit(true);
  gemm<Pair>(rows, columns,
             {depth, a, a_row, a_col, b, b_row, c, c_row, static_cast<Beta>(beta), lanes, alpha});
}

inline void pair_softmax_entry(int64_t keys, int64_t lanes, float* scores, float* max_state,
                               float* sum_state, float* rounded_sum, float* rescale, Pair* pairs) {
  (lanes == kLanes<float> ? softmax_pairs<1> : softmax_pairs<2>)(keys, scores, max_state, sum_state,
                                                                 rounded_sum, rescale, pairs);
}

template <class E>
constexpr Kernels pair_kernels_of() {
  static_assert(kInPairs<E>);
  Kernels kernels = kernels_of<E>();
  kernels.pairs = {kTiles, pair_gemm_entry, pair_rows, pair_softmax_entry, narrow_rows};
  return kernels;
}

}  // namespace qkv::QKV_ISA
