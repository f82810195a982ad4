// An item of a product of few rows with a matrix (row_product.h). By the functions of attention's
// few rows: where the matrix lies along K its rows are keys, and the result is scores; where it
// lies along N they are values, and `input` is their weights.
#pragma once

#include "kernels/products/few_values.h"
#include "row_product.h"

namespace qkv::QKV_ISA {

template <class E>
class RowProductKernel {
  using T = Compute<E>;

 public:
  RowProductKernel(const RowProduct& p, const RowProductItem& item, Arena& arena)
      : p_(p),
        item_(item),
        input_{of(p.input, item.batch), 1, 0, p.input.strides.row, p.input.strides.col},
        matrix_(matrix_of(p, item)),
        next_(item.next ? matrix_of(p, *item.next) : nullptr),
        columns_(item.end - item.begin),
        packed_(arena.take<T>(p.rows * p.depth + kFewStep)),
        places_{arena.take<const E*>(kFewStep), arena.take<const E*>(kFewStep)},
        scores_(arena.take<T>(kFewRows * kFewStep)),
        sums_(arena.take<T>(p.rows * kProductColumns)),
        bias_(arena.take<T>(kProductColumns)) {}

  void run() {
    std::fill_n(sums_, p_.rows * columns_, T(0));
    if (!along_depth(p_)) {
      add_values();
    } else if (p_.rows == 1) {
      dot_row();
    } else {
      add_scores();
    }
    write();
  }

 private:
  // How many numbers of a row of the matrix are multiplied before the next row's: of as many rows
  // as are taken at once, these stay in a first-level cache, where rows that are a multiple of
  // 4 KiB apart have few places.
  static constexpr int64_t kPiece = 512;
  // How many rows of the matrix are multiplied while as many are fetched.
  static constexpr int64_t kBlock = 32;

  template <class Tensor>
  static const E* of(const Tensor& tensor, int64_t batch) {
    return static_cast<const E*>(tensor.data) + batch * tensor.strides.head;
  }
  static const E* matrix_of(const RowProduct& p, const RowProductItem& item) {
    return of(p.matrix, item.batch) + item.begin * p.matrix.strides.row;
  }

  // Fetches rows of `dim` numbers, of which those of the item begin at matrix_ + offset, while the
  // ones before row `begin` are multiplied: from that one on, or behind row `end` the next item's.
  FewAhead<E> ahead_of(int64_t offset, int64_t step, int64_t begin, int64_t end, int64_t dim) {
    const E* first = matrix_ + begin * step;
    if (begin >= end) first = next_, begin = 0;
    const int64_t count = first ? std::min(end - begin, kBlock) : 0;
    for (int64_t i = 0; i < count; ++i) places_[1][i] = first + offset + i * step;
    return {{places_[1], count}, dim};
  }
  FewPlaces<E> places_of(const E* first, int64_t step, int64_t begin, int64_t count) {
    for (int64_t i = 0; i < count + kFewPad; ++i)
      places_[0][i] = first + (begin + std::min(i, count - 1)) * step;
    return {places_[0], count};
  }

  // A row of the matrix after the other, from its beginning to its end: so the CPU fetches by
  // itself what comes next. By add_scores one row of input took 1.3 to 1.7 times as long where the
  // matrix comes from memory (two cores of a Zen 5); of several, the multiplications take longer.
  void dot_row() {
    constexpr int W = kLanes<T>, N = 4;
    gather_row(input_[0], input_.col, p_.depth, packed_);
    for (int64_t n = 0; n < columns_; n += W) {
      Vec<T> part[W];
      for (int j = 0; j < W; ++j) {
        const E* const row = matrix_ + std::min(n + j, columns_ - 1) * p_.matrix.strides.row;
        Vec<T> sum[N] = {};
        const auto add = [&](int64_t k, Vec<T>& to) QKV_INLINE_LAMBDA {
          to = multiply_add<T>(load_wide(row + k), load(packed_ + k), to);
        };
        int64_t k = 0;
        for (; k + N * W <= p_.depth; k += N * W) {
          QKV_UNROLL
          for (int i = 0; i < N; ++i) add(k + i * W, sum[i]);
        }
        for (; k < p_.depth; k += W) add(k, sum[0]);
        part[j] = (sum[0] + sum[1]) + (sum[2] + sum[3]);
      }
      T numbers[W];
      store(numbers, sum_lanes<T>(part));
      std::copy_n(numbers, std::min<int64_t>(W, columns_ - n), sums_ + n);
    }
  }

  void add_scores() {
    const int64_t step = p_.matrix.strides.row;
    for (int64_t k = 0; k < p_.depth; k += kPiece)
      pack_few_queries<E>(Rows<const E>{input_.data + k * input_.col, 1, 0, input_.row, input_.col},
                          0, p_.rows, std::min(kPiece, p_.depth - k), T(1), packed_ + k * p_.rows);
    for (int64_t n = 0; n < columns_; n += kBlock) {
      const int64_t count = std::min(kBlock, columns_ - n);
      for (int64_t k = 0; k < p_.depth; k += kPiece) {
        const int64_t dim = std::min(kPiece, p_.depth - k);
        FewAhead<E> ahead = ahead_of(k, step, n + kBlock, columns_, dim);
        few_scores<E>(p_.rows, dim, places_of(matrix_ + k, step, n, count), packed_ + k * p_.rows,
                      scores_, ahead);
        for (int64_t m = 0; m < p_.rows; ++m)
          for (int64_t j = 0; j < count; ++j)
            sums_[m * columns_ + n + j] += scores_[m * kFewStep + j];
      }
    }
  }

  void add_values() {
    const int64_t step = p_.matrix.strides.col;
    T ones[kMostProductRows];
    std::fill_n(ones, kMostProductRows, T(1));
    for (int64_t m = 0; m < p_.rows; ++m)
      gather_row(input_[m], input_.col, p_.depth, packed_ + m * p_.depth);
    for (int64_t k = 0; k < p_.depth; k += kBlock) {
      const int64_t count = std::min(kBlock, p_.depth - k);
      for (int64_t m = 0; m < p_.rows; ++m)
        std::copy_n(packed_ + m * p_.depth + k, count, scores_ + m * kFewStep);
      FewAhead<E> ahead = ahead_of(0, step, k + kBlock, p_.depth, columns_);
      add_few_values<E>(p_.rows, columns_, places_of(matrix_, step, k, count), scores_, ones, sums_,
                        sums_, ahead);
    }
    constexpr int64_t kStep = 2 * kLanes<T>;
    for (int64_t m = 0; m < p_.rows; ++m)
      for (int64_t n = 0; n + kStep <= columns_; n += kStep)
        from_parts<E>(sums_ + m * columns_ + n);
  }

  void write() {
    const Strides &out = p_.output.strides, &bias = p_.bias.strides;
    std::fill_n(bias_, columns_, T(0));
    if (p_.bias.data)
      for (int64_t n = 0; n < columns_; ++n)
        bias_[n] = widen(static_cast<const E*>(p_.bias.data)[(item_.begin + n) * bias.col]);
    E* const to = static_cast<E*>(p_.output.data) + item_.batch * out.head + item_.begin * out.col;
    for (int64_t m = 0; m < p_.rows; ++m)
      store_row<E>(columns_, to + m * out.row, out.col, [&](const auto& at) QKV_INLINE_LAMBDA {
        return at(sums_ + m * columns_) + at(bias_);
      });
  }

  const RowProduct& p_;
  const RowProductItem& item_;
  const Rows<const E> input_;
  const E* const matrix_;      // its first row, or column, of the item
  const E* const next_;        // and of the next item
  const int64_t columns_;      // of the item
  T* const packed_;            // [M, K], in pieces as few_scores takes queries; or as it is
  const E** const places_[2];  // of the rows that are multiplied, and of those that are fetched
  T* const scores_;            // [M, kFewStep], of a block; or weights
  T* const sums_;              // [M, columns_]
  T* const bias_;              // [columns_]
};

template <class E>
size_t row_product(const RowProduct& p, const RowProductItem& item, void* workspace) {
  Arena arena(workspace);
  RowProductKernel<E> kernel(p, item, arena);
  if (!arena.counting()) kernel.run();
  return arena.used();
}

}  // namespace qkv::QKV_ISA
