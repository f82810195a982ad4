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

// Calls f(n, is_turned, i) for the numbers of a row: n vectors, at most `most`, from i on, of the
// first run and of the second one, or of what is not rotated. Both are constants.
template <int most = 2, class T, class F>
QKV_INLINE void for_blocks_of_row(const RowRuns<T>& at, const F& f) {
  constexpr int W = kLanes<T>;
  const std::integral_constant<int, 1> one;
  const std::integral_constant<int, 2> two;
  const auto run = [&](auto is_turned, int64_t i, int64_t end) QKV_INLINE_LAMBDA {
    for (; most == 2 && i + 2 * W <= end; i += 2 * W) f(two, is_turned, i);
    for (; i < end; i += W) f(one, is_turned, i);
  };
  run(std::true_type(), 0, at.pairs);
  run(std::false_type(), at.rest, at.width);
}

// n vectors of each run, a and b, turned; interleaved, of the only one. In memory they are of type
// S, cos and sin are of their position.
template <int n, bool kInterleaved, class S, class T>
QKV_INLINE void turn(const Vec<T>* a, const Vec<T>* b, const T* cos, const T* sin, Vec<T>* left,
                     Vec<T>* right) {
  for (int h = 0; h < n; ++h) {
    const Vec<T> c = load(cos + h * kLanes<T>), s = load(sin + h * kLanes<T>);
    if constexpr (kInterleaved) {
      const Vec<T> other = n == 2 && kInParts<S> ? a[1 - h] : swap_neighbours(a[h]);
      left[h] = a[h] * c + other * s;
    } else {
      left[h] = a[h] * c - b[h] * s;
      right[h] = b[h] * c + a[h] * s;
    }
  }
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
    for_blocks_of_row(at, [&](auto n, auto is_turned, int64_t i)
                              QKV_INLINE_LAMBDA { is_turned ? turn_rows<n>(i) : pass<n>(i); });
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

  // A block of all rows, so that the weights stay in registers.
  template <int n>
  QKV_INLINE void turn_rows(int64_t i) const {
    const int64_t pairs = tables.runs.pairs;
    const T *const cos = tables.cos + i, *const sin = tables.sin + i;
    Vec<T> of_a[n], of_b[n], a[n], b[n], left[n], right[n];
    load_weight<n>(i, of_a);
    if (!kInterleaved) load_weight<n>(pairs + i, of_b);
    for (int g = 0; g < group.count; ++g) {
      const int64_t row = group.position[g] * pairs;
      normal<n>(g, i, of_a, a);
      if (!kInterleaved) normal<n>(g, pairs + i, of_b, b);
      turn<n, kInterleaved, S, T>(a, b, cos + row, sin + row, left, right);
      store_vectors<n>(y[g] + i, left);
      if (!kInterleaved) store_vectors<n>(y[g] + pairs + i, right);
    }
  }
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
