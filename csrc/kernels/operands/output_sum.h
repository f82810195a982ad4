// The output of a tile, O^T [Dv x lanes], while it is summed over blocks of keys, and the weights
// that values are multiplied by.
#pragma once

#include "kernels/operands/operand.h"
#include "kernels/operands/rows.h"
#include "kernels/operands/tile.h"
#include "kernels/score/softmax.h"
#include "kernels/simd/transpose.h"

namespace qkv::QKV_ISA {

// Writes the columns of output [padded(dim) x lanes] times factors [lanes] (null: 1) to rows begin,
// begin + 1, ... of `to`, one for each row of the tile. They are transposed in registers.
template <class E, class T>
void write_columns(const Tile& tile, int64_t dim, const T* factors, const T* output,
                   const Rows<E>& to, int64_t begin) {
  constexpr int W = kLanes<T>;
  for (int v = 0; v < tile.lanes; v += W) {
    const Vec<T> factor = factors ? load(factors + v) : splat(T(1));
    const int rows = std::min(W, tile.rows - v);
    E* at[W];
    row_addresses(to, begin + v, rows, at);
    const T* from = output + v;
    for (int64_t d = 0; d < dim; d += W) {
      Vec<T> square[W];
      QKV_UNROLL
      for (int i = 0; i < W; ++i, from += tile.lanes)
        square[i] = without_negative_zero(load(from) * factor);
      exchange<T, W / 2>(square);
      if (to.col == 1 && d + W <= dim && rows == W) {
        QKV_UNROLL
        for (int r = 0; r < W; ++r) store_narrow(at[r] + d, square[r]);
      } else {
        T parts[W][W];
        QKV_UNROLL
        for (int r = 0; r < W; ++r) store(parts[r], square[r]);
        for (int r = 0; r < rows; ++r)
          store_row(std::min<int64_t>(W, dim - d), at[r] + d * to.col, to.col,
                    [&](auto part) QKV_INLINE_LAMBDA { return part(parts[r]); });
      }
    }
  }
}

// Writes the rows of output [rows x dim] times factors [rows] to rows begin, begin + 1, ... of
// `to`.
template <class E, class T>
void write_rows(const Tile& tile, int64_t dim, const T* factors, const T* output, const Rows<E>& to,
                int64_t begin) {
  for (int r = 0; r < tile.rows; ++r, output += dim)
    store_row(dim, to[begin + r], to.col,
              [=](auto at) QKV_INLINE_LAMBDA { return at(output) * factors[r]; });
}

template <class E>
class OutputSum {
  using T = Compute<E>;

 public:
  using Reference = QKV_ISA::Reference<T>;  // what weights are relative to

  explicit OutputSum(Arena&) {}

  // Whether the output is divided by a sum of its own, that of rounded weights; if not, softmax()
  // leaves it alone.
  static bool has_own_sum(const Problem&) { return false; }

  // softmax_tile; own_sum [lanes] is updated as sum_state is.
  void softmax(const Tile& tile, int64_t keys, T* scores, T* max_state, T* sum_state, T*,
               T* rescale) const {
    softmax_tile(tile.lanes, keys, scores, max_state, sum_state, rescale);
  }
  // The weights [keys x lanes] that softmax() has made were changed.
  void change_weights(const Tile&, int64_t, const T*) const {}

  // The weights [keys x lanes], those that softmax() or change_weights() had last, as what values
  // [Dv x depth] are multiplied by.
  RightOperand<T> operand(const Tile& tile, int64_t, int64_t, const T* weights) const {
    return {weights, tile.step};
  }
};

}  // namespace qkv::QKV_ISA
