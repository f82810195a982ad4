// What the backward pass knows of a block of rows before it looks at the first key, and its scratch
// memory.
#pragma once

#include "kernels/passes/backward_operands.h"
#include "kernels/score/dropout.h"
#include "kernels/score/score.h"
#include "kernels/score/softmax.h"
#include "kernels/simd/exp.h"
#include "kernels/simd/transpose.h"

namespace qkv::QKV_ISA {

// The statistics of one vector of lanes (BackwardScratch).
template <class T>
struct GradLanes {
  ShiftedExp<T> by[1];
  Vec<T> factor, delta;
};

template <class E>
struct BackwardScratch : BackwardOperands<E> {
  using Element = E;
  using RowTile = BackwardTile<E>;
  using T = Compute<E>;
  static constexpr bool kTwice = false;  // see DoubleScratch

  // weight_ij = factor_i * exp(score_ij - base_i) / 2^shift_i;
  // delta_i = sum_j weight_ij * dP_ij - dlse_i, of which the sum is <dO_i, O_i> unless row_sums.h
  // has it. All [kGradRows].
  T *base, *shift, *factor, *delta;
  T *weights, *grad_scores;  // [padded(kKeyBlock), kGradRows]
  ScoreTiles<T> kept;        // [kKeyBlock, kGradRows], by the options of the scores
  T* grad_query;             // [kTileRows, padded(D)], the rows of a tile
  T* marks;                  // [padded(kKeyBlock), kGradRows], see repair/marks.h; or null
  Dropout<T> dropout;
  bool hides_pairs = false;  // whether pairs of the block of rows and the item's keys are hidden
  bool needs_marks = false;  // whether, besides, something in these rows is not finite

  // For an item of `key_count` keys; if 0, for one tile of keys at a time.
  BackwardScratch(Arena& arena, const Problem& p, const BackwardArgs&, int64_t key_count)
      : BackwardOperands<E>(arena, p, key_count ? key_count : kKeyBlock),
        base(arena.take<T>(kGradRows)),
        shift(arena.take<T>(kGradRows)),
        factor(arena.take<T>(kGradRows)),
        delta(arena.take<T>(kGradRows)),
        weights(arena.take<T>(padded<T>(kKeyBlock) * kGradRows)),
        grad_scores(arena.take<T>(padded<T>(kKeyBlock) * kGradRows)),
        kept(take_score_tiles<T>(arena, p, kKeyBlock * kGradRows)),
        grad_query(arena.take<T>(kTileRows<T> * padded<T>(p.head_dim))),
        marks(hides_any(p) ? arena.take<T>(padded<T>(kKeyBlock) * kGradRows) : nullptr),
        dropout(p) {}

  GradLanes<T> lanes(int64_t lane) const {
    return {{ShiftedExp<T>(load(shift + lane))}, load(factor + lane), load(delta + lane)};
  }

  // Whether base, factor and delta of the first `rows` rows are finite.
  bool statistics_are_finite(int64_t rows) const {
    T zero = 0;
    for (int64_t r = 0; r < rows; ++r) zero += (base[r] + factor[r] + delta[r]) * 0;
    return zero == 0;
  }
};

// W elements `col` apart, widened.
template <class E, class T = Compute<E>>
QKV_INLINE Vec<T> load_strided(const E* p, int64_t col) {
  if (!kFixedBits || col == 1) return load_wide(p);
  T all[kLanes<T>];
  for (int l = 0; l < kLanes<T>; ++l) all[l] = widen(p[l * col]);
  return load(all);
}

// Adds up the products of elements [0, dim) of rows a and b: lane by lane in `sums` what fills
// whole vectors of elements that lie side by side, and in the number that it returns what does not.
template <class E, class T = Compute<E>>
QKV_INLINE T multiply_elements(const E* a, int64_t a_col, const E* b, int64_t b_col, int64_t dim,
                               Vec<T>& sums) {
  int64_t d = 0;
  sums = Vec<T>{};
  if (kFixedBits || (a_col == 1 && b_col == 1)) {
    const auto at = [&](const E* x, int64_t col, int64_t i)
                        QKV_INLINE_LAMBDA { return load_strided<E>(x + i * col, col); };
    SumOfRow<T> sum;
    for (; d + SumOfRow<T>::kStep <= dim; d += SumOfRow<T>::kStep)
      sum.add([&](int64_t i)
                  QKV_INLINE_LAMBDA { return at(a, a_col, d + i) * at(b, b_col, d + i); });
    sums = sum.in_one_vector();
  }
  T rest = 0;
  for (; d < dim; ++d) rest += widen(a[d * a_col]) * widen(b[d * b_col]);
  return rest;
}

// to [padded(rows)] = the dot products of rows begin, begin + 1, ... of a and b, and zeros. The
// lanes of as many rows as a vector has are summed at once.
template <class E, class T = Compute<E>>
void row_dots(Rows<const E> a, Rows<const E> b, int64_t begin, int64_t rows, int64_t dim, T* to) {
  constexpr int W = kLanes<T>;
  for (int64_t r = 0; r < rows; r += W) {
    Vec<T> sums[W];
    T rest[W];
    const int64_t count = std::min<int64_t>(W, rows - r);
    for (int64_t i = count; i < W; ++i) sums[i] = Vec<T>{}, rest[i] = 0;
    for (int64_t i = 0; i < count; ++i)
      rest[i] = multiply_elements(a[begin + r + i], a.col, b[begin + r + i], b.col, dim, sums[i]);
    store(to + r, sum_lanes<T>(sums) + load(rest));
  }
}

// Computes base, shift and factor of `rows` rows, so that weight = exp(score - lse) is factor *
// exp(score - base) / 2^shift: nothing is rounded before the exponential (Reference in softmax.h),
// and the factor is computed in double. Rows with nothing to attend to, whose lse is -inf, and
// lanes without a row get a factor of 0, and so weights of exactly 0. An lse of +inf is that of a
// sink of +inf in a row all of whose scores are -inf: it is the base, and the factor is 1.
template <class E, class T = Compute<E>>
void split_lse(const Problem& p, const Rows<const T>& lse, int64_t row, int64_t rows,
               const BackwardScratch<E>& s) {
  constexpr int kVectors = kLanes<T> / kLanes<double>;
  const int64_t lanes = padded<T>(rows);
  T numbers[kGradRows];
  for (int64_t r = 0; r < rows; ++r) numbers[r] = *lse[row + r];
  std::fill(numbers + rows, numbers + lanes, -kInfinity<T>);
  // lse = log(sum of exp(score)) over S keys. If all scores of the row were equal, each would be
  // lse - log(S), and no score is ever larger than lse. The weights' exponent is taken relative to
  // that point, or one less than log(2) beside it, so that it stays small. Where bits are fixed, a
  // row knows nothing of S.
  const T spread = kFixedBits ? T(0) : T(63 - __builtin_clzll(uint64_t(p.seqlen_k) | 1)) * T(kLn2);
  for (int64_t r = 0; r < lanes; r += kLanes<T>) {
    const Reference<T> reference(load(numbers + r) - spread);
    store(s.base + r, reference.base);
    store(s.shift + r, reference.shift);
  }
  for (int64_t r = 0; r < lanes; r += kLanes<T>) {
    Vec<double> exponent[kVectors];
    QKV_UNROLL
    for (int i = 0; i < kVectors; ++i) {
      const int64_t at = r + i * kLanes<double>;
      const Vec<double> of = load_double(numbers + at);
      exponent[i] = load_double(s.shift + at) - (of - load_double(s.base + at)) * kLog2e;
      exponent[i] = of == kInfinity<double> ? Vec<double>{} : exponent[i];
      exponent[i] = of == -kInfinity<double> ? of : exponent[i];
    }
    exp2<double>(exponent);
    QKV_UNROLL
    for (int i = 0; i < kVectors; ++i) store_double(s.factor + r + i * kLanes<double>, exponent[i]);
  }
}

// Computes what rows [row, row + rows) need of the forward pass: base, shift, factor and delta.
template <class E>
void load_statistics(const Problem& p, const BackwardArgs& a, Plane plane, int64_t row,
                     int64_t rows, const BackwardScratch<E>& s) {
  using T = Compute<E>;
  split_lse(p, rows_of<T>(p, a.lse, plane), row, rows, s);
  const Rows<const E> output = rows_of<E>(p, a.output, plane);
  const Rows<const E> grad_output = rows_of<E>(p, a.grad_output, plane);
  const Rows<const T> grad_lse = rows_of<T>(p, a.grad_lse, plane);
  const Rows<const T> row_sums = rows_of<T>(p, a.row_sums, plane);
  std::fill(s.delta + rows / kLanes<T> * kLanes<T>, s.delta + kGradRows, T(0));
  if (row_sums.data) {
    for (int64_t r = 0; r < rows; ++r) {
      const T* const sums = row_sums[row + r];
      s.delta[r] = sums[0], s.factor[r] /= sums[1];
    }
  } else if (grad_output.data && output.data) {
    row_dots(grad_output, output, row, rows, p.head_dim_v, s.delta);
  } else {
    std::fill_n(s.delta, rows, T(0));
  }
  if (grad_lse.data)
    for (int64_t r = 0; r < rows; ++r) s.delta[r] -= *grad_lse[row + r];
}

}  // namespace qkv::QKV_ISA
