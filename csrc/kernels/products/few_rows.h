// Products for planes of few rows, as in decoding. Here a vector runs along the head dimension, so
// that each element of a key and of a value is loaded once for all rows. With a row in each lane,
// as elsewhere, most lanes would be idle, and every element would have to be broadcast.
//
// Here are the scores; the sums of values are in few_values.h.
//
// Scores and weights of a block of keys are a matrix [rows x keys], of which rows are kFewStep
// elements apart: so the softmax has keys in its lanes (score/few_softmax.h).
#pragma once

#include "kernels/operands/rows.h"
#include "kernels/operands/tile.h"
#include "kernels/simd/halves.h"
#include "kernels/simd/transpose.h"

namespace qkv::QKV_ISA {

constexpr int64_t kFewRows = 8;
// The most keys of a block: whole steps of the softmax (few_softmax.h) for every number of lanes,
// and no more than the tile has room for on which options work.
constexpr int64_t kFewKeys = 96;
// Elements from one row of scores to the next. A product writes up to 16 scores beyond the last
// key, which the next run of keys, or the softmax, overwrites.
constexpr int64_t kFewStep = kFewKeys + 16;

// How many sums a product has in registers: half of them, since what is multiplied has to be there
// too, and at least as many as sum_lanes makes at once.
template <class T>
constexpr int kFewSums = std::max<int>(kLanes<T>, kRegisters / 2);

// Whether a problem is computed in this way. The shape of a plane alone decides, since the forward
// and the backward pass must round alike.
template <class E>
bool has_few_rows(const Problem& p) {
  constexpr int64_t W = kLanes<Compute<E>>;
  return p.group() * p.seqlen_q <= std::min<int64_t>(kFewRows, 2 * W) && p.key.strides.col == 1 &&
         p.value.strides.col == 1 && p.head_dim % W == 0 && p.head_dim_v % W == 0;
}

// `count` rows of key or value, `row` elements apart, the first of which begins at `rows`. As many
// rows from `ahead` on, `ahead_row` apart, are fetched into the cache meanwhile. They need not
// exist; null: none.
template <class E>
struct FewKeys {
  const E* rows;
  int64_t row, count;
  const E* ahead = nullptr;
  int64_t ahead_row = 0;
};

// Fetches rows of `dim` elements into the cache, LINES of its lines at a time: a loop over single
// lines costs a mispredicted branch once a row. All of a row at once: between the multiplications
// the same prefetches brought a cache in memory no faster than without them (Zen 3).
template <int LINES, class E>
QKV_INLINE void fetch_lines(const E* rows, int64_t row, int64_t count, int64_t dim) {
  constexpr int kLine = int(kCacheLine / sizeof(E));
  for (int64_t r = 0; r < count; ++r, rows += row)
    for (int64_t d = 0; d < dim; d += LINES * kLine) {
      QKV_UNROLL
      for (int l = 0; l < LINES; ++l) __builtin_prefetch(rows + d + l * kLine);
    }
}
template <class E>
QKV_INLINE void fetch_rows(const E* rows, int64_t row, int64_t count, int64_t dim) {
  const int64_t lines = dim * int64_t(sizeof(E)) / int64_t(kCacheLine);
  if (lines % 4 == 0) return fetch_lines<4>(rows, row, count, dim);
  if (lines % 2 == 0) return fetch_lines<2>(rows, row, count, dim);
  fetch_lines<1>(rows, row, count, dim);
}

// Calls f(row, rows) for `rows` rows in portions of 8, 4, 2 and 1, no larger than MAX: the size of
// each portion is known when compiling.
template <int MAX, class F>
QKV_INLINE void for_each_portion(int64_t rows, const F& f) {
  int64_t r = 0;
  if constexpr (MAX >= 8)
    for (; r + 8 <= rows; r += 8) f(r, std::integral_constant<int, 8>());
  if constexpr (MAX >= 4)
    for (; r + 4 <= rows; r += 4) f(r, std::integral_constant<int, 4>());
  if constexpr (MAX >= 2)
    for (; r + 2 <= rows; r += 2) f(r, std::integral_constant<int, 2>());
  for (; r < rows; ++r) f(r, std::integral_constant<int, 1>());
}
// With more rows at once, the vectors of the queries would not stay in registers.
template <class T>
constexpr int kFewPortion = std::min(kFewSums<T>, kRegisters / 4);

// Scores of int8 keys are still to be multiplied by the keys' scales. To round only once, as those
// of other keys, they come with what the last addition has rounded off: a second matrix, kFewScores
// elements behind the first.
template <class E>
constexpr bool kHasRests = std::is_same_v<E, int8_t>;
constexpr int64_t kFewScores = kFewRows * kFewStep;

// scores[r * kFewStep + j] = the dot product of query r with key j, for ROWS queries. So many keys
// are taken at a time as make kFewSums sums.
template <class E, int ROWS, class T = Compute<E>>
__attribute__((noinline)) void dot_rows(int64_t dim, const FewKeys<E>& keys, const T* query,
                                        T* scores) {
  constexpr int W = kLanes<T>, SUMS = kFewSums<T>, KEYS = SUMS / ROWS;
  for (int64_t begin = 0; begin < keys.count; begin += KEYS) {
    const int64_t count = std::min<int64_t>(KEYS, keys.count - begin);
    const E* row[KEYS];
    QKV_UNROLL
    for (int j = 0; j < KEYS; ++j)
      row[j] = keys.rows + (begin + std::min<int64_t>(j, count - 1)) * keys.row;
    if (keys.ahead) fetch_rows(keys.ahead + begin * keys.ahead_row, keys.ahead_row, count, dim);
    Vec<T> sum[SUMS];
    QKV_UNROLL
    for (int i = 0; i < SUMS; ++i) sum[i] = Vec<T>{};
    const auto add = [&](int64_t d, auto part) {
      constexpr int half = part;
      Vec<T> q[ROWS];
      QKV_UNROLL
      for (int r = 0; r < ROWS; ++r)
        q[r] = in_register(load(query + r * dim + d + (half > 0 ? W : 0)));
      QKV_UNROLL
      for (int j = 0; j < KEYS; ++j) {
        const Vec<T> k = load_part<half>(row[j] + d);
        QKV_UNROLL
        for (int r = 0; r < ROWS; ++r) sum[r * KEYS + j] += k * q[r];
      }
    };
    int64_t d = 0;
    for (; d + 2 * W <= dim; d += 2 * W) {
      add(d, std::integral_constant<int, 0>());
      add(d, std::integral_constant<int, 1>());
    }
    if (d < dim) add(d, std::integral_constant<int, -1>());
    T sums[SUMS], rests[kHasRests<E> ? SUMS : 1];
    QKV_UNROLL
    for (int i = 0; i < SUMS; i += W) {
      if constexpr (kHasRests<E>) {
        Vec<T> rest;
        store(sums + i, sum_lanes<T>(sum + i, rest));
        store(rests + i, rest);
      } else {
        store(sums + i, sum_lanes<T>(sum + i));
      }
    }
    QKV_UNROLL
    for (int r = 0; r < ROWS; ++r) {
      T* const at = scores + r * kFewStep + begin;
      std::memcpy(at, sums + r * KEYS, KEYS * sizeof(T));
      if constexpr (kHasRests<E>) std::memcpy(at + kFewScores, rests + r * KEYS, KEYS * sizeof(T));
    }
  }
}

// query [rows, D] = rows [row, row + rows) of the queries of a plane, times scale, in the order in
// which load_part reads keys of K.
template <class E, class K = E, class T = Compute<E>>
void pack_few_queries(const Problem& p, int64_t batch, int64_t kv_head, int64_t row, int64_t rows,
                      T* query) {
  constexpr int W = kLanes<T>;
  gather_rows(rows_of<E>(p, p.query, batch, kv_head), row, rows, rows, p.head_dim, query);
  for (int64_t i = 0; i < rows * p.head_dim; i += W) store(query + i, load(query + i) * T(p.scale));
  for (int64_t r = 0; r < rows; ++r, query += p.head_dim)
    for (int64_t d = 0; d + 2 * W <= p.head_dim; d += 2 * W) to_parts<K>(query + d);
}

// scores [rows x keys] = the scores of query [rows, dim].
template <class E, class T = Compute<E>>
void few_scores(int64_t rows, int64_t dim, const FewKeys<E>& keys, const T* query, T* scores) {
  for_each_portion<kFewPortion<T>>(rows, [&](int64_t r, auto count) {
    FewKeys<E> of = keys;
    if (r > 0) of.ahead = nullptr;
    dot_rows<E, count>(dim, of, query + r * dim, scores + r * kFewStep);
  });
}

}  // namespace qkv::QKV_ISA
