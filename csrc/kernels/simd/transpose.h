// Transposition of squares of W x W elements in registers (W: lanes of a vector).
#pragma once

#include "kernels/simd/vec.h"

namespace qkv::QKV_ISA {

// Two of ROWS rows that are `apart` become the lanes of both that `first` says, and those that
// `second` says (shuffle).
template <class T, int apart, int ROWS, class First, class Second>
QKV_INLINE void shuffle_rows(Vec<T>* rows, First first, Second second) {
  QKV_UNROLL
  for (int i = 0; i < ROWS; ++i) {
    if (i & apart) continue;
    const Vec<T> a = rows[i], b = rows[i + apart];
    rows[i] = shuffle(a, b, first);
    rows[i + apart] = shuffle(a, b, second);
  }
}

// Lanes of two rows in turns, those of the first and those of the second half of each 16 bytes: one
// instruction where stage 1 of lanes of 4 bytes would be two.
template <class T, int apart, int ROWS>
QKV_INLINE void interleave_rows(Vec<T>* rows) {
  shuffle_rows<T, apart, ROWS>(
      rows, [](int l) { return (l & 1 ? kLanes<T> : 0) + l / 4 * 4 + l % 4 / 2; },
      [](int l) { return (l & 1 ? kLanes<T> : 0) + l / 4 * 4 + 2 + l % 4 / 2; });
}

// A W x W transposition has stages h = W / 2, W / 4, ... 1. Stage h exchanges the two off-diagonal
// h x h squares of every 2h x 2h square. This does stages h, h / 2, ... 1 on ROWS rows: on W rows
// and with h = W / 2, it transposes them.
template <class T, int h, int ROWS = kLanes<T>>
QKV_INLINE void exchange(Vec<T>* rows) {
  if constexpr (h == 2 && sizeof(rows[0][0]) == 4) {
    // Interleaving moves the upper bit of a lane's number within 16 bytes to the rows, and a bit of
    // the rows to the lower one; twice, it does what stages 2 and 1 do.
    interleave_rows<T, 2, ROWS>(rows);
    interleave_rows<T, 1, ROWS>(rows);
  } else if constexpr (h > 0) {
    shuffle_rows<T, h, ROWS>(
        rows, [](int l) { return (l & h) ? kLanes<T> + l - h : l; },
        [](int l) { return (l & h) ? kLanes<T> + l : l + h; });
    exchange<T, h / 2, ROWS>(rows);
  }
}

// One stage of putting all lanes of each of W vectors together by `fold`, a function of two vectors
// that does not depend on their order: what becomes of vectors a and b, which are h apart. With h =
// 1 it is their last.
template <class T, int h, class Fold>
QKV_INLINE Vec<T> fold_two(Vec<T> a, Vec<T> b, const Fold& fold) {
  const Vec<T> own = shuffle(a, b, [](int l) { return (l & h) ? kLanes<T> + l : l; });
  if constexpr (h > 1 || sizeof(T) == 8) {
    return fold(own, shuffle(a, b, [](int l) { return (l & h) ? kLanes<T> + l - h : l + h; }));
  } else {  // no instruction takes odd lanes of a and even ones of b at once
    const Vec<T> other = shuffle(a, b, [](int l) { return (l & 1) ? l : kLanes<T> + l; });
    return fold(own, shuffle(other, other, [](int l) { return l ^ 1; }));
  }
}

// Returns the vector whose lanes n i to n i + n - 1 are those lanes of vectors[i], n apart, put
// together by `fold`; in the last stage by `last`. Overwrites vectors [W / n].
template <class T, int n = 1, int h = kLanes<T> / 2, class Fold, class Last>
QKV_INLINE Vec<T> fold_lanes(Vec<T>* vectors, const Fold& fold, const Last& last) {
  if constexpr (h < n) {
    return vectors[0];
  } else if constexpr (h == n) {
    return fold_two<T, h>(vectors[0], vectors[1], last);
  } else {
    QKV_UNROLL
    for (int i = 0; i < h / n; ++i)
      vectors[i] = fold_two<T, h>(vectors[i], vectors[i + h / n], fold);
    return fold_lanes<T, n, h / 2>(vectors, fold, last);
  }
}

// A sum along a row, in the lanes of one vector or, where bits are fixed, of kFixedBytes: the lanes
// of which sum_lanes adds those first that vectors half as long have in two.
template <class T>
struct SumOfRow {
  static constexpr int kVectors = kFixedBits ? std::max(1, kFixedBytes / kVectorBytes) : 1;
  static constexpr int64_t kStep = kVectors * kLanes<T>;
  Vec<T> sum[kVectors] = {};

  // Adds term(i), a vector, for the elements of a step from i = 0 on.
  template <class F>
  QKV_INLINE void add(const F& term) {
    QKV_UNROLL
    for (int n = 0; n < kVectors; ++n) sum[n] += term(n * kLanes<T>);
  }
  // Adds a vector of elements from i on.
  QKV_INLINE void add_at(int64_t i, Vec<T> term) {
    sum[kVectors == 1 ? 0 : i / kLanes<T> % kVectors] += term;
  }
  QKV_INLINE Vec<T> in_one_vector() {
    QKV_UNROLL
    for (int n = kVectors / 2; n > 0; n /= 2)
      for (int i = 0; i < n; ++i) sum[i] += sum[i + n];
    return sum[0];
  }
};

// The lambdas below are written with [&]: one that cannot capture has a conversion to a function as
// well, which the compiler makes outside of the target region.

// Returns the vector whose lanes n i to n i + n - 1 are the sums of those lanes of sums[i], n
// apart: with n = 1, of all its lanes. Overwrites sums [W / n].
template <class T, int n = 1>
QKV_INLINE Vec<T> sum_lanes(Vec<T>* sums) {
  const auto add = [&](Vec<T> a, Vec<T> b) QKV_INLINE_LAMBDA { return a + b; };
  return fold_lanes<T, n>(sums, add, add);
}
// Likewise, of all lanes; rest is what the last addition has rounded off, exactly (Knuth's TwoSum).
template <class T>
QKV_INLINE Vec<T> sum_lanes(Vec<T>* sums, Vec<T>& rest) {
  const auto add = [&](Vec<T> a, Vec<T> b) QKV_INLINE_LAMBDA { return a + b; };
  return fold_lanes<T>(sums, add, [&](Vec<T> a, Vec<T> b) QKV_INLINE_LAMBDA {
    const Vec<T> sum = a + b, of_b = sum - a;
    rest = (a - (sum - of_b)) + (b - of_b);
    return sum;
  });
}
// Likewise, the largest of all lanes; NaN or not if one of them is NaN (max).
template <class T>
QKV_INLINE Vec<T> max_lanes(Vec<T>* vectors) {
  const auto larger = [&](Vec<T> a, Vec<T> b) QKV_INLINE_LAMBDA { return max<T>(a, b); };
  return fold_lanes<T>(vectors, larger, larger);
}

// Calls put(c, column c) for the columns of W rows of W elements; load(r) returns row r.
template <class T, class Load, class Put>
QKV_INLINE void transpose_square(const Load& load, const Put& put) {
  constexpr int W = kLanes<T>;
  Vec<T> square[W];
  QKV_UNROLL
  for (int i = 0; i < W; ++i) square[i] = load(i);
  exchange<T, W / 2>(square);
  QKV_UNROLL
  for (int i = 0; i < W; ++i) put(i, square[i]);
}
// out[c][r] = in[r][c] of such rows.
template <class T, class Load>
QKV_INLINE void transpose_square(const Load& load, T* out, int64_t out_row) {
  transpose_square<T>(load,
                      [=](int i, Vec<T> x) QKV_INLINE_LAMBDA { store(out + i * out_row, x); });
}

// out[c][r] = in[r][c], where load(r, c) returns the W elements of row r from column c on. rows and
// columns are multiples of W.
template <class T, class Load>
QKV_INLINE void transpose_with(Load load, T* out, int64_t out_row, int64_t rows, int64_t columns) {
  constexpr int W = kLanes<T>;
  for (int64_t r = 0; r < rows; r += W) {
    for (int64_t c = 0; c < columns; c += W)
      transpose_square<T>([&](int i) { return load(r + i, c); }, out + c * out_row + r, out_row);
  }
}

template <class T>
void transpose(const T* in, int64_t in_row, T* out, int64_t out_row, int64_t rows,
               int64_t columns) {
  transpose_with([&](int64_t r, int64_t c) { return load(in + r * in_row + c); }, out, out_row,
                 rows, columns);
}

// out[c][r] = factor * in[r][c].
template <class T>
void transpose(const T* in, int64_t in_row, T* out, int64_t out_row, int64_t rows, int64_t columns,
               T factor) {
  transpose_with([&](int64_t r, int64_t c) { return factor * load(in + r * in_row + c); }, out,
                 out_row, rows, columns);
}

}  // namespace qkv::QKV_ISA
