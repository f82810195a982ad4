// Scores of few rows with keys that are multiplied in pairs of words (few_words.h).
//
// One or two queries multiply one key after the other (dot_single_rows). For more, four keys at a
// time, a *quad*, are transposed within each 16 bytes: vector i of a quad has, four pairs apart,
// pair i of the first, the second, the third and the fourth key. A query has vectors of four times
// the same pair to multiply them with. So a sum has keys in its lanes, four times over, and few
// additions remain: sums of all lanes, as of one key (store_sums), are as much work for each query
// as the products of 128 numbers.
#pragma once

#include "kernels/products/few_dots.h"
#include "kernels/products/few_words.h"

namespace qkv::QKV_ISA {

// How dot_single_rows multiplies by pairs.
template <class K>
struct FewPairs {
  using Key = K;
  using Query = Word<K>;
  using Sum = PairSum<K>;
  using Factor = Words;
  static constexpr int kStep = kWords;
  static constexpr bool kRests = false;

  template <int v, int>
  static QKV_INLINE Words key(const K* row) {
    return words_at(row + v * kWords);
  }
  static QKV_INLINE Words query(const Word<K>* from) { return words_at(from); }
  static QKV_INLINE Vec<Sum> add(Vec<Sum> sum, Words key, Words query) {
    return add_pairs<K>(sum, key, query);
  }
};

// How many quads are taken at a time: two, for which a query is loaded once, where there are
// registers for the sums.
constexpr int kFewQuads = kRegisters / 16, kQuadKeys = 4 * kFewQuads;
static_assert(kQuadKeys <= kFewPad, "rows have room for what is behind the last key");

// How many numbers pack_few_queries needs room for.
template <class E, class K = E>
int64_t few_query_size(const Problem& p) {
  const int64_t rows = p.plane_rows(), dim = p.head_dim;
  return multiplies_pairs<E, K>(dim) ? rows * (2 * dim + 1) + 2 * dim : rows * dim;
}
// What products of packed rows are to be multiplied by, the scale among it, lies behind them.
template <class Number>
Number* units_of(int64_t rows, int64_t dim, Number* packed) {
  return packed + rows * 2 * dim;
}

// to = four times each pair of kWords words, as quads of keys are multiplied with them: vectors
// `step` words apart.
template <class W>
void pack_quad(const W* words, int64_t step, W* to) {
  const Int32 pairs = (Int32)words_at(words);
  Int32 quad[] = {pairs, pairs, pairs, pairs};
  exchange<int32_t, 2, 4>(quad);
  for (int i = 0; i < 4; ++i) std::memcpy(to + i * step, quad + i, sizeof pairs);
}

// Packs rows [row, row + rows), of `dim` numbers each, and their units: portion after portion [dim
// / kWords, rows of the portion, kWords], with quads [dim / kWords, 4, rows of the portion,
// kWords].
template <class E, class K>
void pack_few_pairs(const Rows<const E>& from, int64_t row, int64_t rows, int64_t dim, float scale,
                    float* packed) {
  float *const units = units_of(rows, dim, packed), *const wide = units + rows;
  auto* const words = reinterpret_cast<Word<K>*>(wide + dim);
  for_each_portion<kFewPortion<float>>(rows, [&](int64_t first, auto count) {
    for (int r = 0; r < count; ++r) {
      units[first + r] = scale * row_to_words(from[row + first + r], from.col, dim, wide, words);
      auto* const to = reinterpret_cast<Word<K>*>(packed) + first * 4 * dim + r * kWords;
      for (int64_t d = 0; d < dim; d += kWords)
        if constexpr (count <= kVeryFew)
          std::memcpy(to + d * count, words + d, kVectorBytes);
        else
          pack_quad(words + d, count * kWords, to + d * 4 * count);
    }
  });
}

// scores[r * kFewStep + 4 n + j] = the sum of lanes j, j + 4, ... of sum[r * kFewQuads + n].
template <class S, int ROWS>
QKV_INLINE void store_quads(Vec<S>* sum, S* scores) {
  constexpr int W = kLanes<S>, N = std::min(W, kQuadKeys);
  static_assert(ROWS * kQuadKeys % W == 0);
  QKV_UNROLL
  for (int first = 0; first < ROWS * kQuadKeys; first += W) {
    const Vec<S> all = sum_lanes<S, 4>(sum + first / 4);
    QKV_UNROLL
    for (int i = 0; i < W; i += N) {
      const int row = (first + i) / (kQuadKeys), key = (first + i) % (kQuadKeys);
      store_lanes<N>(scores + row * kFewStep + key, all, i);
    }
  }
}

// sums[r * kFewStep + j] = the dot product of query r with key j, for ROWS queries, packed.
template <class K, int ROWS>
__attribute__((noinline)) void dot_quads(int64_t dim, FewPlaces<K> keys, FewAhead<K>& ahead,
                                         const Word<K>* query, PairSum<K>* sums) {
  using S = PairSum<K>;
  constexpr int KEYS = kQuadKeys;
  const K* const* const end = keys.rows + keys.count;
  for (; keys.rows < end; keys.rows += KEYS, sums += KEYS) {
    Vec<S> sum[ROWS * kFewQuads];
    const K* row[KEYS];
    QKV_UNROLL
    for (int j = 0; j < KEYS; ++j) row[j] = keys.rows[j];
    QKV_UNROLL
    for (int n = 0; n < ROWS * kFewQuads; ++n) sum[n] = Vec<S>{};
    const Word<K>* q = query;
    for (int64_t d = 0; d < dim; d += kWords) {
      ahead.step();
      Int32 quads[KEYS];
      QKV_UNROLL
      for (int j = 0; j < KEYS; ++j) quads[j] = (Int32)words_at(row[j] + d);
      exchange<int32_t, 2, KEYS>(quads);
      QKV_UNROLL
      for (int i = 0; i < 4; ++i) {
        QKV_UNROLL
        for (int r = 0; r < ROWS; ++r, q += kWords) {
          const Words x = in_register(words_at(q));
          QKV_UNROLL
          for (int n = 0; n < kFewQuads; ++n)
            sum[r * kFewQuads + n] =
                add_pairs<K>(sum[r * kFewQuads + n], (Words)quads[4 * n + i], x);
        }
      }
    }
    store_quads<S, ROWS>(sum, sums);
  }
}

// scores [rows x keys] = the scores of the queries of pack_few_pairs, before the scales of keys.
template <class K>
void few_scores_by_pairs(int64_t rows, int64_t dim, FewPlaces<K> keys, const float* query,
                         float* scores) {
  const auto* const packed = reinterpret_cast<const Word<K>*>(query);
  auto* const sums = reinterpret_cast<PairSum<K>*>(scores);
  in_turns(
      keys, dim, [&](const auto& dots) { for_each_portion<kFewPortion<float>>(rows, dots); },
      [&](int64_t count, auto portion) {
        return portion > kVeryFew ? dim / kWords * ((count + kQuadKeys - 1) / kQuadKeys) : 0;
      },
      [&](FewPlaces<K> some, FewAhead<K>& ahead, int64_t at, int64_t r, auto portion) {
        const Word<K>* const q = packed + r * 4 * dim;
        if constexpr (portion <= kVeryFew)
          dot_single_rows<FewPairs<K>, portion>(dim, some, q, sums + r * kFewStep + at);
        else
          dot_quads<K, portion>(dim, some, ahead, q, sums + r * kFewStep + at);
      });
  const float* const units = units_of(rows, dim, query);
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t j = r * kFewStep; j < r * kFewStep + keys.count; j += kLanes<float>)
      store(scores + j, __builtin_convertvector(load(sums + j), Vec<float>) * units[r]);
}

// Packs rows [row, row + rows) of the queries of a plane, times scale, for keys of K.
template <class E, class K = E, class T = Compute<E>>
void pack_few_queries(const Problem& p, Plane plane, int64_t row, int64_t rows, T* query) {
  const Rows<const E> from = rows_of<E>(p, p.query, plane);
  if constexpr (kMayMultiplyPairs<E, K>)
    if (multiplies_pairs<E, K>(p.head_dim))
      return pack_few_pairs<E, K>(from, row, rows, p.head_dim, p.scale, query);
  pack_few_elements<E, K>(from, row, rows, p.head_dim, T(p.scale), query);
}

// scores [rows x keys] = the scores of the queries of pack_few_queries; with keys of int8, before
// their scales.
template <class E, class K = E, class T = Compute<E>>
void few_scores(int64_t rows, int64_t dim, FewPlaces<K> keys, const T* query, T* scores) {
  if constexpr (kMayMultiplyPairs<E, K>)
    if (multiplies_pairs<E, K>(dim)) return few_scores_by_pairs<K>(rows, dim, keys, query, scores);
  few_scores_by_elements<K>(rows, dim, keys, query, scores);
}

}  // namespace qkv::QKV_ISA
