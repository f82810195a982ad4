// Sums of the rows of a matrix, with a few weights for each, for matrices that come from memory:
// some rows are read from their beginnings to their ends, then the next ones.
#pragma once

#include "kernels/gemm/micro_kernel.h"
#include "kernels/products/few_rows.h"
#include "kernels/products/row_ahead.h"

namespace qkv::QKV_ISA {

template <class E>
class RowSums {
  using T = Compute<E>;
  using F = Factor<E>;

 public:
  // Of `rows` rows of weights for `depth` rows of a matrix.
  RowSums(int64_t rows, int64_t depth, Arena& arena)
      : rows_(rows),
        depth_(depth),
        weights_(arena.take<Natural<E>>(rows * whole_units<E>(depth))) {}

  void pack(const Rows<const E>& input) {
    for (int64_t m = 0; m < rows_; ++m) pack_row(input[m], input.col, depth_, weights_of(m));
  }

  // sums [rows, whole_units(columns)] = weights matrix; rows of `matrix` [depth, columns] are
  // `step` apart.
  void run(const E* matrix, int64_t step, int64_t columns, T* sums) const {
    const int64_t width = whole_units<E>(columns), bytes = columns * int64_t(sizeof(E));
    const int64_t soon = kTaken * (1 + kRowAhead / (kTaken * bytes)) * step;
    const bool by_lines = fetches_lines(rows_) || bytes < kPage / 2;  // too short to be foreseen
    std::fill_n(sums, rows_ * width, T(0));
    for_each_portion<kTaken>(depth_, [&](int64_t k, auto taken) {
      const E* const rows = matrix + k * step;
      for (int r = 0; r < taken && !by_lines; ++r) touch_pages(rows + r * step + soon, bytes);
      for_each_portion<kPortion>(rows_, [&](int64_t m, auto count) {
        add_rows<count, taken>(weights_of(m) + k, rows, step, columns, by_lines && !m ? soon : 0,
                               sums + m * width);
      });
    });
    if constexpr (!kInPairs<E>)
      for (int64_t n = 0; n < rows_ * width; n += kUnit) from_parts<E>(sums + n);
  }

 private:
  static constexpr int64_t kUnit = kRowUnit<E>;
  // How many rows of the matrix are taken at once: so many that there are registers for their
  // weights in each of kPortion rows.
  static constexpr int kTaken = kInPairs<E> ? 8 : 4, kPortion = std::min(4, kRegisters / 8);
  template <int R>
  static constexpr int kFactors = kInPairs<E> ? (R + 1) / 2 : R;

  Natural<E>* weights_of(int64_t m) const { return weights_ + m * whole_units<E>(depth_); }

  // sums [M, columns] += R rows of the matrix, times their weights. Elements `soon` behind those
  // that are multiplied are fetched; 0: none.
  template <int M, int R>
  __attribute__((noinline)) void add_rows(const Natural<E>* weights, const E* matrix, int64_t step,
                                          int64_t columns, int64_t soon, T* sums) const {
    constexpr int N = kFactors<R>;
    const int64_t width = whole_units<E>(columns);
    Vec<F> weight[M][N];
    for (int m = 0; m < M; ++m)
      for (int i = 0; i < N; ++i)
        weight[m][i] = splat_weight(weights + m * whole_units<E>(depth_), i);
    const auto add = [&](const E* rows, int64_t row_step, T* to) QKV_INLINE_LAMBDA {
      Vec<F> x[2][N];
      load_rows<R>(rows, row_step, x);
      QKV_UNROLL
      for (int m = 0; m < M; ++m, to += width) {
        Vec<T> a = load(to), b = load(to + kLanes<T>);
        QKV_UNROLL
        for (int i = 0; i < N; ++i) {
          a = add_product(x[0][i], weight[m][i], a, F{});
          b = add_product(x[1][i], weight[m][i], b, F{});
        }
        store(to, a), store(to + kLanes<T>, b);
      }
    };
    int64_t n = 0;
    for (; n + kUnit <= columns; n += kUnit) {
      for (int r = 0; r < R && soon; ++r)
        for (int64_t i = 0; i < kUnit; i += int64_t(kCacheLine / sizeof(E)))
          __builtin_prefetch(matrix + r * step + n + soon + i);
      add(matrix + n, step, sums + n);
    }
    if (n == columns) return;
    E rest[R * kUnit] = {};
    for (int r = 0; r < R; ++r) std::copy_n(matrix + r * step + n, columns - n, rest + r * kUnit);
    add(rest, kUnit, sums + n);
  }

  // A weight, or a pair of them, in all lanes.
  static QKV_INLINE Vec<F> splat_weight(const Natural<E>* weights, int i) {
    if constexpr (kInPairs<E>)
      return broadcast<Vec<F>>(reinterpret_cast<const F*>(weights) + i);
    else
      return splat(weights[i]);
  }

  // x [2]: the first and the second half of a unit of columns, in pairs of two rows or as
  // load_part has them.
  template <int R>
  static QKV_INLINE void load_rows(const E* rows, int64_t step, Vec<F> (&x)[2][kFactors<R>]) {
    QKV_UNROLL
    for (int i = 0; i < kFactors<R>; ++i) {
      if constexpr (kInPairs<E>) {
        const E* const second = 2 * i + 1 < R ? rows + (2 * i + 1) * step : nullptr;
        zip_vectors(rows + 2 * i * step, second, x[0][i], x[1][i]);
      } else {
        x[0][i] = load_part<0>(rows + i * step);
        x[1][i] = load_part<1>(rows + i * step);
      }
    }
  }

  const int64_t rows_, depth_;
  Natural<E>* const weights_;  // [rows, whole_units(depth)]
};

}  // namespace qkv::QKV_ISA
