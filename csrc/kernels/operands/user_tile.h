// Reads and writes the piece of a user's [B..., H, L, S] tensor that a tile covers. The tile is
// [keys x lanes] and the user's piece [rows x keys], so it is transposed on the way, in registers,
// W x W elements at a time (W: lanes of a vector).
#pragma once

#include "kernels/operands/rows.h"
#include "kernels/operands/tile.h"
#include "kernels/simd/halves.h"
#include "kernels/simd/transpose.h"

namespace qkv::QKV_ISA {

// Reads W consecutive elements of a user's row; those beyond the first `count` are not read, and 0.
template <class T, class M>
QKV_INLINE Vec<T> read_vector(const M* from, int64_t col, int64_t count) {
  constexpr int W = kLanes<T>;
  if constexpr (std::is_same_v<Compute<M>, T>) {
    if (col == 1 && count >= W) return load_wide(from);
  } else if constexpr (!kIsHalf<M>) {
    typedef M Elements __attribute__((vector_size(W * sizeof(M)), aligned(sizeof(M)), may_alias));
    if (col == 1 && count >= W)
      return __builtin_convertvector(*reinterpret_cast<const Elements*>(from), Vec<T>);
  }
  T some[W] = {};
  for (int i = 0; i < std::min<int64_t>(W, count); ++i) some[i] = T(widen(from[i * col]));
  return load(some);
}

// Adds the first min(W, count) elements of x to a user's row.
template <class T, class M>
QKV_INLINE void add_vector(Vec<T> x, M* to, int64_t col, int64_t count) {
  constexpr int W = kLanes<T>;
  typedef M Elements __attribute__((vector_size(W * sizeof(M)), aligned(sizeof(M)), may_alias));
  if (col == 1 && count >= W) {
    *reinterpret_cast<Elements*>(to) += __builtin_convertvector(x, Elements);
  } else {
    for (int i = 0; i < std::min<int64_t>(W, count); ++i) to[i * col] += M(x[i]);
  }
}

// Calls each(j, v, elements) for every j in [0, keys) and every vector of lanes v, v + 1, ... of
// the tile: `elements` are those of key + j in these rows. Lanes without a row repeat the last row.
template <class T, class M, class Each>
QKV_INLINE void read_tile(const Rows<const M>& rows, const Tile& tile, int64_t key, int64_t keys,
                          const Each& each) {
  constexpr int W = kLanes<T>;
  for (int v = 0; v < tile.lanes; v += W) {
    const M* from[W];
    for (int r = 0; r < W; ++r)
      from[r] = rows[tile.row + std::min(v + r, tile.rows - 1)] + key * rows.col;
    for (int64_t j = 0; j < keys; j += W) {
      // The last square ends with the last key, and so may begin within the one before: a vector
      // that the user's rows do not fill would be read one by one.
      const int64_t begin = std::max<int64_t>(0, std::min(j, keys - W));
      const int64_t skipped = j - begin;
      transpose_square<T>(
          [&](int r) QKV_INLINE_LAMBDA {
            return read_vector<T>(from[r] + begin * rows.col, rows.col, keys - begin);
          },
          [&](int i, Vec<T> elements) QKV_INLINE_LAMBDA {
            if (uint64_t(i - skipped) < uint64_t(keys - j)) each(begin + i, v, elements);
          });
    }
  }
}

// The user's piece += factors [lanes] * tile; null: 1. Rows that share memory, because the tensor
// broadcasts, are added in their order.
template <class T, class M>
void add_tile(const Rows<M>& rows, const Tile& tile, int64_t key, int64_t keys, const T* from,
              const T* factors) {
  constexpr int W = kLanes<T>;
  for (int v = 0; v < tile.lanes; v += W) {
    const Vec<T> factor = factors ? load(factors + v) : splat(T(1));
    for (int64_t j = 0; j < keys; j += W)
      transpose_square<T>(
          [&](int i) QKV_INLINE_LAMBDA {
            return load(from + std::min(j + i, keys - 1) * tile.step + v) * factor;
          },
          [&](int r, Vec<T> x) QKV_INLINE_LAMBDA {
            if (v + r >= tile.rows) return;
            add_vector<T>(x, rows[tile.row + v + r] + (key + j) * rows.col, rows.col, keys - j);
          });
  }
}

}  // namespace qkv::QKV_ISA
