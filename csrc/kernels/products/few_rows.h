// Products for planes of few rows, as in decoding. Here a vector runs along the head dimension, so
// that each element of a key and of a value is loaded once for all rows. With a row in each lane,
// as elsewhere, most lanes would be idle, and every element would have to be broadcast.
#pragma once

#include "kernels/operands/rows.h"
#include "kernels/operands/tile.h"
#include "kernels/simd/halves.h"
#include "kernels/simd/transpose.h"

namespace qkv::QKV_ISA {

constexpr int64_t kFewRows = 8;

// Whether a problem is computed in this way. The shape of a plane alone decides, since the forward
// and the backward pass must round alike.
template <class E>
bool has_few_rows(const Problem& p) {
  constexpr int64_t W = kLanes<Compute<E>>;
  return p.group() * p.seqlen_q <= std::min<int64_t>(kFewRows, 2 * W) && p.key.strides.col == 1 &&
         p.value.strides.col == 1 && p.head_dim % W == 0 && p.head_dim_v % W == 0;
}

// Rows of memory that will be needed soon, to be fetched into the cache. They need not exist.
struct Ahead {
  const void* rows = nullptr;  // null: nothing
  int64_t step = 0, bytes = 0;

  Ahead() = default;
  template <class E>
  Ahead(const E* rows, int64_t step, int64_t dim)
      : rows(rows), step(step * int64_t(sizeof(E))), bytes(dim * int64_t(sizeof(E))) {}

  QKV_INLINE void ask(int64_t row) const {
    if (!rows) return;
    for (int64_t at = 0; at < bytes; at += int64_t(kCacheLine))
      __builtin_prefetch(static_cast<const char*>(rows) + row * step + at);
  }
};

// scores[j * step + r] = the dot product of key j with query r, for `keys` keys and ROWS queries. W
// / ROWS keys are taken at a time, whose sums make one vector. Rows of `key` are key_row apart.
template <class E, int ROWS, class T = Compute<E>>
__attribute__((noinline)) void dot_rows(int64_t dim, int64_t keys, const E* key, int64_t key_row,
                                        const T* query, T* scores, int64_t step,
                                        const Ahead& ahead) {
  constexpr int W = kLanes<T>, KEYS = W / ROWS;
  for (int64_t begin = 0; begin < keys; begin += KEYS) {
    const int64_t count = std::min<int64_t>(KEYS, keys - begin);
    const E* row[KEYS];
    QKV_UNROLL
    for (int j = 0; j < KEYS; ++j)
      row[j] = key + (begin + std::min<int64_t>(j, count - 1)) * key_row;
    for (int64_t j = begin; j < begin + count; ++j) ahead.ask(j);
    Vec<T> sum[W];
    QKV_UNROLL
    for (int i = 0; i < W; ++i) sum[i] = Vec<T>{};
    for (int64_t d = 0; d < dim; d += W) {
      Vec<T> q[ROWS];
      QKV_UNROLL
      for (int r = 0; r < ROWS; ++r) q[r] = in_register(load(query + r * dim + d));
      QKV_UNROLL
      for (int j = 0; j < KEYS; ++j) {
        const Vec<T> k = load_wide(row[j] + d);
        QKV_UNROLL
        for (int r = 0; r < ROWS; ++r) sum[j * ROWS + r] += k * q[r];
      }
    }
    T sums[W];
    store(sums, sum_lanes<T>(sum));
    for (int64_t j = 0; j < count; ++j)
      std::memcpy(scores + (begin + j) * step, sums + j * ROWS, ROWS * sizeof(T));
  }
}

// Calls f(row, rows) for `rows` rows in portions of 4, 2 and 1, no larger than MAX: the size of
// each portion is known when compiling.
template <int MAX, class F>
QKV_INLINE void for_each_portion(int64_t rows, const F& f) {
  int64_t r = 0;
  if constexpr (MAX >= 4)
    for (; r + 4 <= rows; r += 4) f(r, std::integral_constant<int, 4>());
  for (; r + 2 <= rows; r += 2) f(r, std::integral_constant<int, 2>());
  for (; r < rows; ++r) f(r, std::integral_constant<int, 1>());
}

// query [rows, D] = rows [row, row + rows) of the queries of a plane, times scale.
template <class E, class T = Compute<E>>
void pack_few_queries(const Problem& p, int64_t batch, int64_t kv_head, int64_t row, int64_t rows,
                      T* query) {
  gather_rows(rows_of<E>(p, p.query, batch, kv_head), row, rows, rows, p.head_dim, query);
  for (int64_t i = 0; i < rows * p.head_dim; i += kLanes<T>)
    store(query + i, load(query + i) * T(p.scale));
}

// scores [keys x lanes] = the scores of query [rows, dim], 0 in lanes without a row.
template <class E, class T = Compute<E>>
void few_scores(const Tile& tile, int64_t dim, int64_t keys, const E* key, int64_t key_row,
                const T* query, T* scores, const Ahead& ahead) {
  for (int64_t j = 0; j < keys; ++j)
    for (int v = 0; v < tile.lanes; v += kLanes<T>) store(scores + j * tile.step + v, Vec<T>{});
  for_each_portion<kLanes<T>>(tile.rows, [&](int64_t r, auto count) {
    dot_rows<E, count>(dim, keys, key, key_row, query + r * dim, scores + r, tile.step,
                       r == 0 ? ahead : Ahead());
  });
}

// output [ROWS, dim] += weights^T values, for NV vectors of columns.
template <class E, int ROWS, int NV, class T = Compute<E>>
QKV_INLINE void add_columns(int64_t dim, int64_t keys, const E* value, int64_t value_row,
                            const T* weights, int64_t step, T* output) {
  constexpr int W = kLanes<T>;
  Vec<T> sum[ROWS][NV];
  QKV_UNROLL
  for (int r = 0; r < ROWS; ++r)
    for (int v = 0; v < NV; ++v) sum[r][v] = load(output + r * dim + v * W);
  for (int64_t j = 0; j < keys; ++j) {
    Vec<T> x[NV];
    QKV_UNROLL
    for (int v = 0; v < NV; ++v) x[v] = load_wide(value + j * value_row + v * W);
    QKV_UNROLL
    for (int r = 0; r < ROWS; ++r) {
      const Vec<T> weight = splat(weights[j * step + r]);
      QKV_UNROLL
      for (int v = 0; v < NV; ++v) sum[r][v] += weight * x[v];
    }
  }
  QKV_UNROLL
  for (int r = 0; r < ROWS; ++r)
    for (int v = 0; v < NV; ++v) store(output + r * dim + v * W, sum[r][v]);
}

// output [rows, dim] += weights^T values, weights [keys, step].
template <class E, class T = Compute<E>>
void add_few_values(int64_t rows, int64_t dim, int64_t keys, const E* value, int64_t value_row,
                    const T* weights, int64_t step, T* output, const Ahead& ahead) {
  if (dim == 0) return;
  constexpr int W = kLanes<T>;
  // What is asked for while one panel of columns is summed, so that all is by the end.
  const int64_t panels = (dim + 2 * W - 1) / (2 * W), share = (keys + panels - 1) / panels;
  int64_t asked = 0;
  for (int64_t d = 0; d < dim; d += 2 * W) {
    for (const int64_t end = std::min(keys, asked + share); asked < end; ++asked) ahead.ask(asked);
    for_each_portion<4>(rows, [&](int64_t r, auto count) {
      (d + 2 * W <= dim ? add_columns<E, count, 2>
                        : add_columns<E, count, 1>)(dim, keys, value + d, value_row, weights + r,
                                                    step, output + r * dim + d);
    });
  }
}

}  // namespace qkv::QKV_ISA
