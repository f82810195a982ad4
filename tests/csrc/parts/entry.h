// The table of the parts of one instruction set (kernel_parts.h).
#pragma once

#include "kernels/gemm/gemm.h"
#include "kernels/operands/operand.h"
#include "kernels/simd/halves.h"
#include "kernels/simd/sine.h"
#include "kernels/simd/tanh.h"
#include "kernels/simd/transpose.h"
#ifdef QKV_PAIRS
#include "kernels/score/pair_softmax.h"
#endif
#include "parts/kernel_parts.h"

namespace qkv::QKV_ISA {

template <class T>
void gemm_part(int64_t rows, int64_t columns, int64_t depth, const void* a, int64_t a_row,
               int64_t a_col, const void* b, int64_t b_row, void* c, int64_t c_row, int beta,
               const void* lanes) {
  gemm<T>(rows, columns,
          {depth, static_cast<const T*>(a), a_row, a_col, static_cast<const T*>(b), b_row,
           static_cast<T*>(c), c_row, static_cast<Beta>(beta), static_cast<const T*>(lanes)});
}

// Calls apply(x) with an array x of one vector of `in` after the other; out is what it makes of it.
template <class T, class Apply>
void each_vector(const void* in, void* out, int64_t count, const Apply& apply) {
  for (int64_t i = 0; i < count; i += kLanes<T>) {
    Vec<T> x[] = {load(static_cast<const T*>(in) + i)};
    apply(x);
    store(static_cast<T*>(out) + i, x[0]);
  }
}

template <class T>
void exp2_part(const void* in, void* out, int64_t count) {
  each_vector<T>(in, out, count, [](Vec<T>(&x)[1]) { exp2<T>(x); });
}

template <class T>
void exp_part(const void* in, void* out, int64_t count) {
  const ShiftedExp<T> by[] = {ShiftedExp<T>(Vec<T>{})};
  each_vector<T>(in, out, count, [&](Vec<T>(&x)[1]) { exp<T>(x, by); });
}

template <class T>
void tanh_part(const void* in, void* out, int64_t count) {
  each_vector<T>(in, out, count, [](Vec<T>(&x)[1]) { tanh<T>(x); });
}

// Of sine(x, quarters).
template <class T, int quarters>
void sine_part(const void* in, void* out, int64_t count) {
  each_vector<T>(in, out, count, [](Vec<T>(&x)[1]) {
    in_double<T>(x, [&](Vec<double> y) QKV_INLINE_LAMBDA { return sine(y, quarters); });
  });
}

template <class T>
void transpose_part(const void* in, int64_t in_row, void* out, int64_t out_row, int64_t rows,
                    int64_t columns) {
  transpose<T>(static_cast<const T*>(in), in_row, static_cast<T*>(out), out_row, rows, columns,
               T(1));
}

#ifdef QKV_PAIRS
inline void pair_gemm_part(int64_t rows, int64_t columns, int64_t depth, const Pair* a,
                           int64_t a_row, int64_t a_col, const Pair* b, int64_t b_row, float* c,
                           int64_t c_row, int beta, const float* lanes, float alpha) {
  const ProductUnit unit(true);
  gemm<Pair>(rows, columns,
             {depth, a, a_row, a_col, b, b_row, c, c_row, static_cast<Beta>(beta), lanes, alpha});
}
inline void pair_softmax_part(int64_t lanes, int64_t keys, float* scores, float* max_state,
                              float* sum_state, float* rounded_sum, float* rescale, Pair* pairs) {
  const ProductUnit unit(true);
  softmax_pairs(lanes, keys, scores, max_state, sum_state, rounded_sum, rescale, pairs);
}
#endif

template <class E, class T = Compute<E>>
constexpr KernelParts parts_of() {
  KernelParts parts{{kMaxRows[0], kMaxRows[1]},
                    kTakesHalves<T> ? kLanes<T> / 2 : kLanes<T>,
                    gemm_part<T>,
                    exp2_part<T>,
                    exp_part<T>,
                    tanh_part<T>,
                    sine_part<T, 0>,
                    sine_part<T, 1>,
                    transpose_part<T>};
#ifdef QKV_PAIRS
  if (kInPairs<E>)
    parts.pairs = {kTiles, pair_gemm_part, pair_rows, pair_softmax_part, narrow_rows};
#endif
  return parts;
}
template <class E>
constexpr KernelParts kParts = parts_of<E>();

}  // namespace qkv::QKV_ISA
