// Dot products of a few rows with the rows of a matrix, for matrices that come from memory: rows of
// the matrix are read from their beginnings to their ends, one block after the other, which is how
// a CPU fetches by itself what comes next.
#pragma once

#include "kernels/gemm/micro_kernel.h"
#include "kernels/products/few_rows.h"
#include "kernels/products/row_ahead.h"

namespace qkv::QKV_ISA {

template <class E>
class RowDots {
  using T = Compute<E>;
  using F = Factor<E>;

 public:
  // Of `rows` rows of `depth` numbers, a multiple of kProductUnit.
  RowDots(int64_t rows, int64_t depth, Arena& arena)
      : rows_(rows),
        depth_(depth),
        padded_(whole_units<E>(depth)),
        packed_(arena.take<Natural<E>>(rows * padded_)),
        row_(arena.take<Natural<E>>(padded_)) {}

  void pack(const Rows<const E>& input) {
    for_each_portion<kPortion>(rows_, [&](int64_t first, auto count) {
      for (int r = 0; r < count; ++r) {
        pack_row(input[first + r], input.col, depth_, row_);
        Natural<E>* const to = packed_ + first * padded_ + r * kStep;
        for (int64_t k = 0; k < padded_; k += kStep) std::copy_n(row_ + k, kStep, to + k * count);
      }
    });
  }

  // dots [rows, whole_units(columns)] = input matrix^T; rows of `matrix` [columns, depth] are
  // `step` apart.
  void run(const E* matrix, int64_t step, int64_t columns, T* dots) const {
    constexpr int W = kLanes<T>;
    const int64_t width = whole_units<E>(columns);
    const bool is_held = rows_ * padded_ * int64_t(sizeof(Natural<E>)) <= kHeldBytes;
    for (int64_t n = 0; n < columns; n += W)
      for_each_portion<kPortion>(rows_, [&](int64_t first, auto count) {
        (is_held ? dot_block<count, 1>
                 : dot_block<count, rows_at_once(count)>)(packed_ + first * padded_,
                                                          matrix + n * step, step, columns - n,
                                                          depth_, dots + first * width + n, width);
      });
  }

 private:
  // How many numbers of a row are multiplied at once.
  static constexpr int kStep = kInPairs<E> ? 2 * kLanes<T> : kLanes<T>;
  // Of eight rows at once, what is packed would leave a first-level cache before it is used again.
  static constexpr int kPortion = std::min(4, kFewPortion<T>);

  // While the packed rows stay in a first-level cache, of 32 KiB, rows of the matrix are taken one
  // after the other: as one run of memory, of which the CPU fetches by itself what comes next.
  // Beside 1024 numbers 2 packed rows take 0.7 to 0.8 of the time that they take with several rows
  // of the matrix at once, and 4 rows 0.8 to 0.9 (Zen 5, one thread, from memory). Of packed rows
  // in the second-level cache, what is loaded has to serve several rows of the matrix.
  static constexpr int64_t kHeldBytes = 24 * 1024;
  // Of one row of input, what waits is for memory; else as many rows of the matrix, a power of two,
  // as there are registers for sums.
  static constexpr int rows_at_once(int inputs) {
    int rows = 1;
    while (inputs > 1 && 2 * rows * inputs <= kFewSums<T> && 2 * rows <= kLanes<T>) rows *= 2;
    return rows;
  }

  template <int M, int R>
  static constexpr bool kByLines = fetches_lines(M) && (R == 1 || kIsHalf<E>);

  static QKV_INLINE Vec<F> load_step(const E* from) {
    if constexpr (!kInPairs<E>) return load_wide(from);
    Vec<F> pairs;
    std::memcpy(&pairs, from, sizeof pairs);
    return pairs;
  }
  // The last kProductUnit numbers of a row, and zeros.
  static QKV_INLINE Vec<F> load_rest(const E* from) {
    E rest[kStep] = {};
    std::copy_n(from, std::min<int64_t>(kStep, kProductUnit), rest);
    return load_step(rest);
  }

  // dots [M, lanes], rows of which are `width` apart = a portion of the packed rows times the next
  // rows of the matrix, of which there are `left`: the last one stands for those beyond.
  template <int M, int R>
  static void dot_block(const Natural<E>* packed, const E* matrix, int64_t step, int64_t left,
                        int64_t depth, T* dots, int64_t width) {
    constexpr int W = kLanes<T>;
    static_assert(W % R == 0);
    const int64_t soon = std::max(R * step, kRowAhead / int64_t(sizeof(E)));
    Vec<T> sums[M][W];
    for (int j = 0; j < W; j += R) {
      const E* rows[R];
      for (int r = 0; r < R; ++r) rows[r] = matrix + std::min<int64_t>(j + r, left - 1) * step;
      if (!kByLines<M, R>) touch_pages(rows[0] + soon, R * step * int64_t(sizeof(E)));
      Vec<T> sum[M][R];
      sum_products<M, R>(packed, rows, depth, sum);
      for (int i = 0; i < M; ++i) std::copy_n(sum[i], R, sums[i] + j);
    }
    for (int i = 0; i < M; ++i) store(dots + i * width, sum_lanes<T>(sums[i]));
  }

  // sum [M, R]: vectors whose lanes are to be added.
  template <int M, int R>
  static QKV_INLINE void sum_products(const Natural<E>* packed, const E* const (&rows)[R],
                                      int64_t depth, Vec<T> (&sum)[M][R]) {
    // As many sums do not wait for each other as four products take; a line is fetched once.
    constexpr int kSums = std::max(1, 4 / (R * M)), kLine = int(kCacheLine / sizeof(E));
    constexpr int U = std::max(kSums, kLine / kStep);
    const auto whole = [&](const E* from) QKV_INLINE_LAMBDA { return load_step(from); };
    const auto rest = [&](const E* from) QKV_INLINE_LAMBDA { return load_rest(from); };
    Vec<T> parts[kSums][M][R] = {};
    const auto add = [&](int64_t k, int u, const auto& load_from) QKV_INLINE_LAMBDA {
      Vec<F> of_row[R];
      QKV_UNROLL
      for (int r = 0; r < R; ++r) {
        if (kByLines<M, R> && u * kStep % kLine == 0)
          __builtin_prefetch(rows[r] + k + kRowAhead / int64_t(sizeof(E)));
        of_row[r] = load_from(rows[r] + k);
      }
      QKV_UNROLL
      for (int i = 0; i < M; ++i, packed += kStep) {
        Vec<F> input;
        std::memcpy(&input, packed, sizeof input);
        QKV_UNROLL
        for (int r = 0; r < R; ++r) {
          Vec<T>& to = parts[u % kSums][i][r];
          to = add_product(of_row[r], input, to, F{});
        }
      }
    };
    int64_t k = 0;
    for (; k + U * kStep <= depth; k += U * kStep) {
      QKV_UNROLL
      for (int u = 0; u < U; ++u) add(k + u * kStep, u, whole);
    }
    for (; k + kStep <= depth; k += kStep) add(k, 0, whole);
    if (k < depth) add(k, 0, rest);
    QKV_UNROLL
    for (int i = 0; i < M; ++i)
      for (int r = 0; r < R; ++r) {
        sum[i][r] = parts[0][i][r];
        for (int s = 1; s < kSums; ++s) sum[i][r] += parts[s][i][r];
      }
  }

  const int64_t rows_, depth_;
  const int64_t padded_;  // the depth, in whole steps
  // Portion after portion: [padded_ / kStep, rows of the portion, kStep].
  Natural<E>* const packed_;
  Natural<E>* const row_;  // [padded_]
};

}  // namespace qkv::QKV_ISA
