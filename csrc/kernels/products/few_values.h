// Sums of values for planes of few rows, whose weights are [rows x keys] (few_rows.h).
#pragma once

#include "kernels/products/few_rows.h"

namespace qkv::QKV_ISA {

// Every how many values rows are fetched.
constexpr int64_t kFewFetch = 4;

// What the sums of a block are rescaled by after its first turn (in_turns).
template <class T>
constexpr T kFewOnes[8] = {1, 1, 1, 1, 1, 1, 1, 1};

// Adds values to an output [rows, dim] in panels: each(g) calls g(r, ...) for each of them, whose
// rows begin at r, and add(values, ahead, at, r, rescale, before, ...) adds some of the values,
// from place `at` on, with the rescale and the output before of these rows.
template <class E, class T, class Each, class Add>
QKV_INLINE void add_panels(FewPlaces<E> values, int64_t dim, const T* rescale, const T* before,
                           const T* output, const Each& each, const Add& add) {
  in_turns(
      values, dim, each,
      [&](int64_t count, auto rows, auto...) {
        return rows > kVeryFew ? (count + kFewFetch - 1) / kFewFetch : 0;
      },
      [&](FewPlaces<E> some, FewAhead<E>& ahead, int64_t at, int64_t r, auto... which) {
        if (at == 0)
          add(some, ahead, at, r, rescale + r, before + r * dim, which...);
        else
          add(some, ahead, at, r, kFewOnes<T>, output + r * dim, which...);
      });
}

// output [ROWS, NV vectors] = rescale [ROWS] * before + weights^T values [from vector `first` on],
// of values that begin at rows [count]. HALF is the place of the first vector in its pair
// (load_part), or -1. A row of output has `dim` elements.
template <class E, int ROWS, int NV, int HALF, class T = Compute<E>>
__attribute__((noinline)) void add_columns(FewPlaces<E> values, FewAhead<E>& ahead, int64_t first,
                                           int64_t dim, const T* weights, const T* rescale,
                                           const T* before, T* output) {
  constexpr int W = kLanes<T>;
  const int64_t column = first * W;
  Vec<T> sum[ROWS][NV];
  QKV_UNROLL
  for (int r = 0; r < ROWS; ++r) {
    QKV_UNROLL
    for (int v = 0; v < NV; ++v) sum[r][v] = Vec<T>{};
  }
  const E* const* at = values.rows;
  for (const E* const* const end = at + values.count; at < end; ++at, ++weights) {
    if constexpr (ROWS <= kVeryFew)
      fetch<NV * W>(at[values.ahead] + column);
    else if ((end - at) % kFewFetch == 0)
      ahead.step();
    const E* const value = *at + column - (HALF > 0 ? W : 0);
    const auto wide = [&](auto v) QKV_INLINE_LAMBDA {
      constexpr int half = HALF < 0 ? -1 : (HALF + v) % 2;
      return load_part<half>(value + (HALF < 0 ? v : (HALF + v) / 2 * 2) * W);
    };
    if constexpr (ROWS == 1) {  // each is used once: were they loaded before, sums would be spilled
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
                    const T* rescale, const T* before, T* output) {
  add_panels(
      values, dim, rescale, before, output, [&](const auto& g) { for_each_panel<E>(rows, dim, g); },
      [&](FewPlaces<E> some, FewAhead<E>& ahead, int64_t at, int64_t r, const T* scale,
          const T* from, auto portion, int64_t first, auto n, auto half) {
        add_columns<E, portion, n, half>(some, ahead, first, dim, weights + r * kFewStep + at,
                                         scale, from, output + r * dim);
      });
}

}  // namespace qkv::QKV_ISA
