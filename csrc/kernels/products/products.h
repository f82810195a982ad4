// The products of attention, for elements and for pairs. A pass with other operands than these
// seven, say a second query or key, calls the same functions with those (operands/operand.h).
#pragma once

#include "kernels/operands/operands.h"

namespace qkv::QKV_ISA {

// S^T = K Q^T and dP^T = V dO^T: to [keys x lanes] = rows of key or value [keys x dim] times
// columns [dim x lanes], added to what is there with Beta::one.
template <class F, class T>
QKV_INLINE void multiply_rows(const Tile& tile, const LeftOperand<F>& rows,
                              const RightOperand<F>& columns, T* to, Beta beta = Beta::zero,
                              Ahead* ahead = nullptr) {
  multiply(rows, columns, whole_columns<F>(tile.rows), Sum<T>{to, tile.step, beta, ahead});
}

// dQ^T += K^T dS^T: sum [dim x lanes], or [rows x dim] if it is in rows, += the transposed rows of
// `keys` keys [dim x keys] times a tile [keys x lanes]. (O^T += V^T P^T, which rescales the sum, is
// ForwardTiles::add_values.)
template <class E, class T>
QKV_INLINE void add_over_keys(const Tile& tile, const LeftOperand<Factor<E>>& columns, int64_t keys,
                              const TileAsB<E>& operand, const T* from, bool with_rest,
                              bool in_rows, T* sum) {
  operand.each(tile, from, keys, columns.depth, with_rest, [&](const auto& b) {
    if (in_rows) return multiply_by_rows(columns, b, tile.rows, sum, Beta::one);
    multiply(columns, b, whole_columns<Factor<E>>(tile.rows), Sum<T>{sum, tile.lanes, Beta::one});
  });
}

// dV += P^T dO and dK += dS^T Q: sum [keys x padded(dim)] += tiles [keys x rows] times as many rows
// of grad_output or query [rows x dim].
template <class E, class T>
QKV_INLINE void add_over_rows(int64_t keys, const TileAsA<E>& operand, const T* from, int64_t count,
                              const RightOperand<Factor<E>>& rows, int64_t dim, bool with_rest,
                              T* sum, Ahead* ahead) {
  operand.each(from, keys, count, with_rest, [&](const auto& a) {
    multiply(a, rows, whole_columns<Factor<E>>(dim), Sum<T>{sum, padded<T>(dim), Beta::one, ahead});
  });
}

}  // namespace qkv::QKV_ISA
