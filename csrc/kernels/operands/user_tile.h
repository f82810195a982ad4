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

// Calls put(j, elements) for the keys of a square of W of a user's rows, from `key` on: W of them
// or, where they are transposed as pairs of bf16, 2 W. Those beyond the first `count` are not read,
// and what lies `ahead` keys further (keys_ahead) is prefetched.
template <class T, bool kOfPairs, class M, class Put>
QKV_INLINE void read_square(const M* const (&from)[kLanes<T>], int64_t key, int64_t col,
                            int64_t count, int64_t ahead, const Put& put) {
  const auto at = [&](int r) QKV_INLINE_LAMBDA {
    const M* const its = from[r] + key * col;
    __builtin_prefetch(its + ahead * col, 0, 2);
    return its;
  };
  if constexpr (kOfPairs) {
    transpose_square<float>([&](int r) QKV_INLINE_LAMBDA { return (Vec<float>)load_pairs(at(r)); },
                            [&](int i, Vec<float> pairs) QKV_INLINE_LAMBDA {
                              put(2 * i, part_of_pairs(0, (HalfBits)pairs));
                              put(2 * i + 1, part_of_pairs(1, (HalfBits)pairs));
                            });
  } else {
    transpose_square<T>([&](int r) QKV_INLINE_LAMBDA { return read_vector<T>(at(r), col, count); },
                        put);
  }
}

// How many keys after these, [key, key + keys), those lie that a pass reads next of the same rows,
// for prefetches: the hardware fetches no rows that are as far apart as those of a mask.
inline int64_t keys_ahead(const Problem& p, int64_t key, int64_t keys) {
  return std::min(keys, p.seqlen_k - key - keys);
}

// Calls put(j, elements) for every j in [0, keys), in squares.
template <class T, bool kOfPairs, class M, class Put>
QKV_INLINE void read_squares(const M* const (&from)[kLanes<T>], int64_t keys, int64_t col,
                             int64_t ahead, const Put& put) {
  constexpr int kKeys = kOfPairs ? 2 * kLanes<T> : kLanes<T>;
  int64_t j = 0;
  for (; j + kKeys <= keys; j += kKeys)
    read_square<T, kOfPairs>(from, j, col, kKeys, ahead,
                             [&](int i, Vec<T> elements)
                                 QKV_INLINE_LAMBDA { put(j + i, elements); });
  if (j == keys) return;
  // The last square ends with the last key, and so may begin within the one before: a vector that
  // the user's rows do not fill would be read one by one.
  const int64_t begin = std::max<int64_t>(0, keys - kKeys);
  Vec<T> last[kKeys];
  read_square<T, kOfPairs>(from, begin, col, keys - begin, ahead,
                           [&](int i, Vec<T> elements) QKV_INLINE_LAMBDA { last[i] = elements; });
  for (; j < keys; ++j) put(j, last[j - begin]);
}

// Calls each(j, v, elements) for every j in [0, keys) and every vector of lanes v, v + 1, ... of
// the tile: `elements` are those of key + j in these rows. Lanes without a row repeat the last row.
template <class T, class M, class Each>
QKV_INLINE void read_tile(const Problem& p, const Rows<const M>& rows, const Tile& tile,
                          int64_t key, int64_t keys, const Each& each) {
  constexpr int W = kLanes<T>;
  const int64_t ahead = keys_ahead(p, key, keys);
  for (int v = 0; v < tile.lanes; v += W) {
    const M* from[W];
    for (int r = 0; r < W; ++r)
      from[r] = rows[tile.row + std::min(v + r, tile.rows - 1)] + key * rows.col;
    const auto put = [&](int64_t j, Vec<T> elements) QKV_INLINE_LAMBDA { each(j, v, elements); };
    constexpr bool kHasPairs = kInParts<M> && std::is_same_v<T, float>;
    if (kHasPairs && rows.col == 1 && keys >= 2 * W)
      read_squares<T, kHasPairs>(from, keys, 1, ahead, put);
    else
      read_squares<T, false>(from, keys, rows.col, ahead, put);
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
