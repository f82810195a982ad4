// Sums of values for planes of few rows, whose weights are [rows x keys] (few_rows.h).
#pragma once

#include "kernels/products/few_rows.h"

namespace qkv::QKV_ISA {

// Rows are fetched every so many values.
constexpr int64_t kFewFetch = 8;

// f(0), f(1), ... f(N - 1), constants.
template <int N, int I = 0, class F>
QKV_INLINE void for_each_constant(const F& f) {
  if constexpr (I < N) {
    f(std::integral_constant<int, I>());
    for_each_constant<N, I + 1>(f);
  }
}

// output [ROWS, NV vectors] = rescale [ROWS] * before + weights^T values [from vector `first` on],
// of values that begin at rows [count]. HALF is the place of the first vector in its pair
// (load_part), or -1. A row of output has `dim` elements.
template <class E, int ROWS, int NV, int HALF, class T = Compute<E>>
__attribute__((noinline)) void add_columns(FewPlaces<E> values, int64_t first, int64_t dim,
                                           const T* weights, const T* rescale, const T* before,
                                           T* output, FewAhead<E>& ahead) {
  constexpr int W = kLanes<T>;
  const int64_t column = first * W;
  Vec<T> sum[ROWS][NV];
  QKV_UNROLL
  for (int r = 0; r < ROWS; ++r) {
    QKV_UNROLL
    for (int v = 0; v < NV; ++v) sum[r][v] = Vec<T>{};
  }
  const E* const* at = values.rows;
  for (const E* const* const end = at + values.count; at < end;) {
    ahead.step();
    for (const E* const* const stop = std::min(at + kFewFetch, end); at < stop; ++at, ++weights) {
      const E* const value = *at + column - (HALF > 0 ? W : 0);
      const auto wide = [&](auto v) QKV_INLINE_LAMBDA {
        constexpr int half = HALF < 0 ? -1 : (HALF + v) % 2;
        return load_part<half>(value + (HALF < 0 ? v : (HALF + v) / 2 * 2) * W);
      };
      if constexpr (ROWS ==
                    1) {  // each is used once: were they loaded before, sums would be spilled
        const Vec<T> weight = in_register(splat(*weights));
        for_each_constant<NV>([&](auto v) QKV_INLINE_LAMBDA {
          sum[0][v] = multiply_add<T>(weight, wide(v), sum[0][v]);
        });
      } else {
        Vec<T> x[NV];
        for_each_constant<NV>([&](auto v) QKV_INLINE_LAMBDA { x[v] = in_register(wide(v)); });
        QKV_UNROLL
        for (int r = 0; r < ROWS; ++r) {
          const Vec<T> weight = in_register(splat(weights[r * kFewStep]));
          QKV_UNROLL
          for (int v = 0; v < NV; ++v) sum[r][v] = multiply_add<T>(weight, x[v], sum[r][v]);
        }
      }
    }
  }
  QKV_UNROLL
  for (int r = 0; r < ROWS; ++r) {
    QKV_UNROLL
    for (int v = 0; v < NV; ++v) {
      const int64_t i = r * dim + column + v * W;
      store(output + i, multiply_add<T>(load(before + i), splat(rescale[r]), sum[r][v]));
    }
  }
}

// Calls f(row, rows, vector, vectors, half) for each panel of an output [rows, dim]; the last three
// are those of add_columns.
template <class E, class F, class T = Compute<E>>
QKV_INLINE void for_each_panel(int64_t rows, int64_t dim, const F& f) {
  const int64_t vectors = dim / kLanes<T>, pairs = kInParts<E> ? vectors / 2 * 2 : vectors;
  for_each_portion<kFewPortion<T>>(rows, [&](int64_t r, auto portion) {
    constexpr int NV = std::min<int>(8, kFewSums<T> / portion);
    constexpr std::integral_constant<int, -1> as_they_lie;
    const auto add = [&](int64_t first, auto n) {
      if constexpr (!kInParts<E>)
        f(r, portion, first, n, as_they_lie);
      else if (NV % 2 == 0 || first % 2 == 0)
        f(r, portion, first, n, std::integral_constant<int, 0>());
      else
        f(r, portion, first, n, std::integral_constant<int, 1>());
    };
    int64_t v = 0;
    // Of four vectors twice two: a panel of one would leave the units waiting.
    for (; v + NV <= pairs && (NV != 3 || pairs - v != 4); v += NV)
      add(v, std::integral_constant<int, NV>());
    if constexpr (NV > 4)
      for (; v + 4 <= pairs; v += 4) add(v, std::integral_constant<int, 4>());
    if constexpr (NV > 2)
      for (; v + 2 <= pairs; v += 2) add(v, std::integral_constant<int, 2>());
    for (; v < vectors; ++v) f(r, portion, v, std::integral_constant<int, 1>(), as_they_lie);
  });
}

// output [rows, dim] = rescale [rows] * before + weights^T values, weights [rows x keys].
template <class E, class T = Compute<E>>
void add_few_values(int64_t rows, int64_t dim, FewPlaces<E> values, const T* weights,
                    const T* rescale, const T* before, T* output, FewAhead<E>& ahead) {
  ahead.steps = 0;
  for_each_panel<E>(rows, dim,
                    [&](auto...) { ahead.steps += (values.count + kFewFetch - 1) / kFewFetch; });
  for_each_panel<E>(rows, dim, [&](int64_t r, auto portion, int64_t first, auto n, auto half) {
    add_columns<E, portion, n, half>(values, first, dim, weights + r * kFewStep, rescale + r,
                                     before + r * dim, output + r * dim, ahead);
  });
}

}  // namespace qkv::QKV_ISA
