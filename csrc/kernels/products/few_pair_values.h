// Sums of values by pairs of two keys (few_pairs.h), for planes of few rows, whose weights are
// [rows x keys].
#pragma once

#include "kernels/products/few_values.h"
#include "kernels/products/few_words.h"

namespace qkv::QKV_ISA {

// The pairs (a[i], b[i]) for half of all i, the first (0) or the second one (1) of every 16 bytes;
// and the sums of all pairs, of which sums of such halves are given: the first or the second half
// of the sums, in their order.
template <int half>
QKV_INLINE Words zip_words(Words a, Words b) {
  return shuffle(a, b,
                 [](int i) { return (i & 1 ? kWords : 0) + i / 8 * 8 + half * 4 + i % 8 / 2; });
}
template <int half, class V>
QKV_INLINE V unzip_sums(V first, V second) {
  return shuffle(first, second, [](int l) {
    constexpr int W = kWords / 2;
    const int i = half * W + l;
    return (i & 4 ? W : 0) + i / 8 * 4 + i % 4;
  });
}

// output [ROWS, N kWords] = rescale [ROWS] * before + units * weights^T values [from element
// `column` on]. A row of output has `dim` elements.
template <class K, int ROWS, int N>
__attribute__((noinline)) void add_pair_columns(FewPlaces<K> values, FewAhead<K>& ahead,
                                                int64_t column, int64_t dim, const Word<K>* weights,
                                                const float* units, const float* rescale,
                                                const float* before, float* output) {
  constexpr int W = kLanes<float>;
  using Sums = Vec<PairSum<K>>;
  Sums sum[ROWS][2 * N];
  QKV_UNROLL
  for (int r = 0; r < ROWS; ++r) {
    QKV_UNROLL
    for (int v = 0; v < 2 * N; ++v) sum[r][v] = Sums{};
  }
  const K* const* at = values.rows;
  for (const K* const* const end = at + values.count; at < end; at += 2, weights += 2) {
    if (ROWS > kVeryFew && (end - at) % kFewFetch == 0) ahead.step();
    Words pairs[2 * N], row[2][N];
    QKV_UNROLL
    for (int k = 0; k < 2; ++k) {  // one row after the other, as a CPU foresees it
      if constexpr (ROWS <= kVeryFew) fetch<N * kWords>(at[values.ahead + k] + column);
      QKV_UNROLL
      for (int v = 0; v < N; ++v) row[k][v] = in_register(words_at(at[k] + column + v * kWords));
    }
    QKV_UNROLL
    for (int v = 0; v < N; ++v) {
      pairs[2 * v] = in_register(zip_words<0>(row[0][v], row[1][v]));
      pairs[2 * v + 1] = in_register(zip_words<1>(row[0][v], row[1][v]));
    }
    QKV_UNROLL
    for (int r = 0; r < ROWS; ++r) {
      int32_t two;
      std::memcpy(&two, weights + r * kFewStep, sizeof two);
      const Words weight = (Words)in_register(two - Int32{});
      QKV_UNROLL
      for (int v = 0; v < 2 * N; ++v) sum[r][v] = add_pairs<K>(sum[r][v], pairs[v], weight);
    }
  }
  const auto put = [&](int r, int64_t i, Sums of) QKV_INLINE_LAMBDA {
    const Vec<float> added = __builtin_convertvector(of, Vec<float>) * units[r];
    store(output + i, multiply_add<float>(load(before + i), splat(rescale[r]), added));
  };
  QKV_UNROLL
  for (int r = 0; r < ROWS; ++r) {
    QKV_UNROLL
    for (int v = 0; v < N; ++v) {
      const int64_t i = r * dim + column + v * kWords;
      put(r, i, unzip_sums<0>(sum[r][2 * v], sum[r][2 * v + 1]));
      put(r, i + W, unzip_sums<1>(sum[r][2 * v], sum[r][2 * v + 1]));
    }
  }
}

// Calls f(row, rows, column, N) for each panel of an output [rows, dim], as add_pair_columns takes
// it.
template <class F>
QKV_INLINE void for_each_pair_panel(int64_t rows, int64_t dim, const F& f) {
  for_each_portion<kFewPortion<float>>(rows, [&](int64_t r, auto portion) {
    constexpr int N = std::max(1, std::min<int>(8, kFewSums<float> / portion) / 2);
    in_steps<N, std::max(1, N / 2), 1>(dim / kWords,
                                       [&](int64_t v, auto n) { f(r, portion, v * kWords, n); });
  });
}

// output [rows, dim] = rescale [rows] * before + weights^T values, weights [rows x keys]. words
// [rows, kFewStep] is scratch memory.
template <class K>
void add_few_values_by_pairs(int64_t rows, int64_t dim, FewPlaces<K> values, const float* weights,
                             Word<K>* words, const float* rescale, const float* before,
                             float* output) {
  float units[kFewRows];
  weights_to_words(rows, values.count, weights, words, units);
  add_panels(
      values, dim, rescale, before, output,
      [&](const auto& g) { for_each_pair_panel(rows, dim, g); },
      [&](FewPlaces<K> some, FewAhead<K>& ahead, int64_t at, int64_t r, const float* scale,
          const float* from, auto portion, int64_t column, auto n) {
        add_pair_columns<K, portion, n>(some, ahead, column, dim, words + r * kFewStep + at,
                                        units + r, scale, from, output + r * dim);
      });
}

}  // namespace qkv::QKV_ISA
