// Sums of values for planes of few rows, whose weights are [rows x keys] (few_rows.h).
#pragma once

#include "kernels/products/few_rows.h"

namespace qkv::QKV_ISA {

// Some values, run after run; rows of a run are `row` elements apart.
template <class E>
struct FewValues {
  struct Run {
    const E* rows;
    int64_t count;
    int64_t weight;  // the place of the first one's weight in a row of weights
  };
  const Run *begin, *end;
  int64_t row;
};

// output [ROWS, NV vectors] = rescale [ROWS] * before + weights^T values [from this column on]. A
// row of output has `dim` elements. Runs are summed as one: where rows lie changes no bit.
template <class E, int ROWS, int NV, class T = Compute<E>>
__attribute__((noinline)) void add_columns(const FewValues<E>& values, int64_t column, int64_t dim,
                                           const T* weights, const T* rescale, const T* before,
                                           T* output) {
  constexpr int W = kLanes<T>;
  Vec<T> sum[ROWS][NV];
  QKV_UNROLL
  for (int r = 0; r < ROWS; ++r) {
    QKV_UNROLL
    for (int v = 0; v < NV; ++v) sum[r][v] = Vec<T>{};
  }
  for (auto* run = values.begin; run != values.end; ++run) {
    const E* value = run->rows + column;
    const T* at = weights + run->weight;
    for (const T* const end = at + run->count; at != end; ++at, value += values.row) {
      Vec<T> weight[ROWS];
      QKV_UNROLL
      for (int r = 0; r < ROWS; ++r) weight[r] = in_register(splat(at[r * kFewStep]));
      const auto add = [&](int v, const Vec<T>& x) QKV_INLINE_LAMBDA {
        QKV_UNROLL
        for (int r = 0; r < ROWS; ++r) sum[r][v] += weight[r] * x;
      };
      QKV_UNROLL
      for (int v = 0; v + 2 <= NV; v += 2) {
        add(v, load_part<0>(value + v * W));
        add(v + 1, load_part<1>(value + v * W));
      }
      if constexpr (NV % 2) add(NV - 1, load_part<-1>(value + (NV - 1) * W));
    }
  }
  QKV_UNROLL
  for (int r = 0; r < ROWS; ++r) {
    QKV_UNROLL
    for (int v = 0; v < NV; ++v) {
      const int64_t i = r * dim + column + v * W;
      store(output + i, load(before + i) * rescale[r] + sum[r][v]);
    }
  }
}

// output [rows, dim] = rescale [rows] * before + weights^T values, weights [rows x keys].
// between(panel, panels) is called before each of the panels into which the work is cut.
template <class E, class Between, class T = Compute<E>>
void add_few_values(int64_t rows, int64_t dim, const FewValues<E>& values, const T* weights,
                    const T* rescale, const T* before, T* output, const Between& between) {
  constexpr int W = kLanes<T>;
  const int64_t panels = std::max<int64_t>(1, rows * dim / (kFewSums<T> * W));
  int64_t panel = 0;
  for_each_portion<kFewPortion<T>>(rows, [&](int64_t r, auto count) {
    constexpr int NV = std::min<int>(8, kFewSums<T> / count);
    int64_t column = 0;
    const auto add = [&](auto vectors) {
      if (panel < panels) between(panel++, panels);
      add_columns<E, count, vectors>(values, column, dim, weights + r * kFewStep, rescale + r,
                                     before + r * dim, output + r * dim);
      column += vectors * W;
    };
    while (column + NV * W <= dim) add(std::integral_constant<int, NV>());
    if constexpr (NV > 4)
      if (column + 4 * W <= dim) add(std::integral_constant<int, 4>());
    if constexpr (NV > 2)
      if (column + 2 * W <= dim) add(std::integral_constant<int, 2>());
    if (column < dim) add(std::integral_constant<int, 1>());
  });
}

}  // namespace qkv::QKV_ISA
