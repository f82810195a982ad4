// The forward pass of a rotation (rotation.h): the rows of a group.
#pragma once

#include "kernels/passes/rotate_tables.h"

namespace qkv::QKV_ISA {

// The forward pass takes twice as many rows as a vector has lanes: the processor adds up squares of
// the second half while it waits for the root and the quotient that are the first half's norms
// (0.90 of the time in bfloat16, two cores of a Zen 5).
template <class T>
using RotatedRows = RowGroup<T, 2 * kLanes<T>>;

// The rows of a group in one tensor.
template <class S>
struct RowsOfGroup {
  S* base;
  const int64_t* offsets;  // of each row
  QKV_INLINE S* operator[](int row) const { return base + offsets[row]; }
};

// The vector of which the lanes add up to the sum of squares of the `width` numbers at x.
template <class T, class S>
QKV_INLINE Vec<T> sum_of_squares(const S* x, int64_t width) {
  constexpr int W = kLanes<T>;
  if constexpr (kFixedBits) {
    SumOfRow<T> squares;
    for (int64_t i = 0; i < width; i += squares.kStep)
      squares.add([&](int64_t n) QKV_INLINE_LAMBDA {
        const Vec<T> number = load_wide(x + i + n);
        return number * number;
      });
    return squares.in_one_vector();
  }
  Vec<T> sum[2] = {}, v[2];
  int64_t i = 0;
  for (; i + 2 * W <= width; i += 2 * W) {
    load_vectors<2>(x + i, v);
    sum[0] += v[0] * v[0], sum[1] += v[1] * v[1];
  }
  if (i < width) {
    load_vectors<1>(x + i, v);
    sum[0] += v[0] * v[0];
  }
  return sum[0] + sum[1];
}

// Of a pair's numbers, the other one: of n vectors that load_vectors has given.
template <class S, int n, class V>
QKV_INLINE V other_of_pair(const V* x, int which) {
  return n == 2 && kInParts<S> ? x[1 - which] : swap_neighbours(x[which]);
}

// The rows of a group, in memory of type S, for which the tables are arranged: of each, x becomes
// y, which may be the same memory.
template <bool kNorm, bool kInterleaved, class S, class T>
struct RotatedGroup {
  const RotationTables<T>& tables;
  const RotatedRows<T>& group;
  const T* weight;
  RowsOfGroup<const S> x;
  RowsOfGroup<S> y;
  alignas(kVectorBytes) T norms[RotatedRows<T>::kRows];

  QKV_INLINE void run(T inverse_dim, T eps) {
    constexpr int W = kLanes<T>;
    const RowRuns<T>& at = tables.runs;
    for (int first = 0; kNorm && first < group.count; first += W) {
      const int count = std::min(W, group.count - first);
      Vec<T> squares[W];
      for (int g = count; g < W; ++g) squares[g] = Vec<T>{};
      for (int g = 0; g < count; ++g) squares[g] = sum_of_squares<T>(x[first + g], at.width);
      store(norms + first, inverse_norms<T>(squares, inverse_dim, eps));
    }
    int64_t i = 0;
    for (; i + 2 * W <= at.pairs; i += 2 * W) turn<2>(i);
    if (i < at.pairs) turn<1>(i);
    for (i = at.rest; i + 2 * W <= at.width; i += 2 * W) pass<2>(i);
    if (i < at.width) pass<1>(i);
  }

 private:
  template <int n>
  QKV_INLINE void load_weight(int64_t i, Vec<T>* w) const {
    for (int h = 0; kNorm && h < n; ++h) w[h] = load(weight + i + h * kLanes<T>);
  }
  template <int n>
  QKV_INLINE void normal(int g, int64_t i, const Vec<T>* w, Vec<T>* v) const {
    load_vectors<n>(x[g] + i, v);
    for (int h = 0; kNorm && h < n; ++h) v[h] = v[h] * norms[g] * w[h];
  }

  // The numbers of n vectors of the first run, and of the second one: all rows, so that the
  // weights stay in registers.
  template <int n>
  QKV_INLINE void turn(int64_t i) const {
    const int64_t pairs = tables.runs.pairs;
    const T *const cos = tables.cos + i, *const sin = tables.sin + i;
    Vec<T> of_a[n], of_b[n], a[n], b[n], c[n], s[n], left[n], right[n];
    load_weight<n>(i, of_a);
    if (!kInterleaved) load_weight<n>(pairs + i, of_b);
    for (int g = 0; g < group.count; ++g) {
      const int64_t row = group.position[g] * pairs;
      normal<n>(g, i, of_a, a);
      if (!kInterleaved) normal<n>(g, pairs + i, of_b, b);
      for (int h = 0; h < n; ++h) {
        c[h] = load(cos + row + h * kLanes<T>), s[h] = load(sin + row + h * kLanes<T>);
        if constexpr (kInterleaved) {
          left[h] = a[h] * c[h] + other_of_pair<S, n>(a, h) * s[h];
        } else {
          left[h] = a[h] * c[h] - b[h] * s[h];
          right[h] = b[h] * c[h] + a[h] * s[h];
        }
      }
      store_vectors<n>(y[g] + i, left);
      if (!kInterleaved) store_vectors<n>(y[g] + pairs + i, right);
    }
  }
  // What is not rotated.
  template <int n>
  QKV_INLINE void pass(int64_t i) const {
    Vec<T> w[n], v[n];
    load_weight<n>(i, w);
    for (int g = 0; g < group.count; ++g) {
      normal<n>(g, i, w, v);
      store_vectors<n>(y[g] + i, v);
    }
  }
};

}  // namespace qkv::QKV_ISA
