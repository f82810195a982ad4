// The table of one instruction set.
#pragma once

#include "kernels/contract.h"
#include "kernels/gemm/gemm.h"
#include "kernels/operands/tile.h"
#include "kernels/passes/backward.h"
#include "kernels/passes/double_backward.h"
#include "kernels/passes/finish_grad.h"
#include "kernels/passes/forward.h"
#include "kernels/passes/hard.h"
#include "kernels/passes/jvp.h"
#include "kernels/passes/merge_parts.h"
#include "kernels/passes/row_sums.h"
#include "kernels/simd/exp.h"
#include "kernels/simd/transpose.h"

namespace qkv::QKV_ISA {

template <class T>
void gemm_entry(int64_t rows, int64_t columns, int64_t depth, const void* a, int64_t a_row,
                int64_t a_col, const void* b, int64_t b_row, void* c, int64_t c_row, int beta,
                const void* lanes) {
  gemm<T>(rows, columns,
          {depth, static_cast<const T*>(a), a_row, a_col, static_cast<const T*>(b), b_row,
           static_cast<T*>(c), c_row, static_cast<Beta>(beta), static_cast<const T*>(lanes)});
}

template <class T>
void exp2_entry(const void* in, void* out, int64_t count) {
  for (int64_t i = 0; i < count; i += kLanes<T>) {
    Vec<T> t[] = {load(static_cast<const T*>(in) + i)};
    exp2<T>(t);
    store(static_cast<T*>(out) + i, t[0]);
  }
}

template <class T>
void exp_entry(const void* in, void* out, int64_t count) {
  const ShiftedExp<T> by[] = {ShiftedExp<T>(Vec<T>{})};
  for (int64_t i = 0; i < count; i += kLanes<T>) {
    Vec<T> x[] = {load(static_cast<const T*>(in) + i)};
    exp<T>(x, by);
    store(static_cast<T*>(out) + i, x[0]);
  }
}

template <class T>
void tanh_entry(const void* in, void* out, int64_t count) {
  for (int64_t i = 0; i < count; i += kLanes<T>) {
    Vec<T> x[] = {load(static_cast<const T*>(in) + i)};
    tanh<T>(x);
    store(static_cast<T*>(out) + i, x[0]);
  }
}

template <class T>
void transpose_entry(const void* in, int64_t in_row, void* out, int64_t out_row, int64_t rows,
                     int64_t columns) {
  transpose<T>(static_cast<const T*>(in), in_row, static_cast<T*>(out), out_row, rows, columns,
               T(1));
}

// Of elements that are multiplied as pairs there are none of these (jvp_kernels in kernel_table.h).
template <class E>
constexpr void add_jvp_kernels(Kernels& kernels) {
  if constexpr (!kInPairs<E>) {
    kernels.jvp_workspace = jvp_workspace<E>;
    kernels.jvp = jvp<E>;
    kernels.double_backward_workspace = double_backward_workspace<E>;
    kernels.double_backward = double_backward<E>;
  }
}

template <class E>
constexpr Kernels kernels_of() {
  using T = Compute<E>;
  Kernels kernels{kTileRows<T>,
                  forward_workspace<E>,
                  forward<E>,
                  merge_parts<E>,
                  backward_workspace<E>,
                  backward<E>,
                  finish_rows<E>,
                  finish_keys<E>,
                  row_sums<E>,
                  hard<E>,
                  nullptr,
                  nullptr,
                  nullptr,
                  nullptr,
                  {kMaxRows[0], kMaxRows[1]},
                  kLanes<T>,
                  gemm_entry<T>,
                  exp2_entry<T>,
                  exp_entry<T>,
                  tanh_entry<T>,
                  transpose_entry<T>};
  add_jvp_kernels<E>(kernels);
  return kernels;
}

}  // namespace qkv::QKV_ISA
