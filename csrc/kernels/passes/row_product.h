// An item of a product of few rows with a matrix (row_product.h). Where the matrix lies along N, by
// what attention has for few rows: rows of the matrix are values, and `input` is their weights.
#pragma once

#include "kernels/products/few_values.h"
#include "kernels/products/row_dots.h"
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
        dots_(p.rows, p.depth, arena),
        inputs_(arena.take<T>(p.rows * p.depth + kFewStep)),
        places_{arena.take<const E*>(kFewStep), arena.take<const E*>(kFewStep)},
        weights_(arena.take<T>(kFewRows * kFewStep)),
        sums_(arena.take<T>(p.rows * kProductColumns)),
        bias_(arena.take<T>(kProductColumns)) {}

  void run() {
    if (along_depth(p_)) {
      dots_.pack(input_);
      dots_.run(matrix_, p_.matrix.strides.row, columns_, sums_);
    } else {
      add_values();
    }
    write();
  }

 private:
  // How many rows of the matrix are multiplied while as many are fetched.
  static constexpr int64_t kBlock = 32;

  template <class Tensor>
  static const E* of(const Tensor& tensor, int64_t batch) {
    return static_cast<const E*>(tensor.data) + batch * tensor.strides.head;
  }
  static const E* matrix_of(const RowProduct& p, const RowProductItem& item) {
    return of(p.matrix, item.batch) + item.begin * p.matrix.strides.row;
  }

  // Fetches rows while the ones before row `begin` are multiplied: from that one on, or behind the
  // last one those of the next item.
  FewAhead<E> ahead_of(int64_t begin, int64_t step) {
    const E* first = matrix_ + begin * step;
    if (begin >= p_.depth) first = next_, begin = 0;
    const int64_t count = first ? std::min(p_.depth - begin, kBlock) : 0;
    for (int64_t i = 0; i < count; ++i) places_[1][i] = first + i * step;
    return {{places_[1], count}, columns_};
  }
  FewPlaces<E> places_of(int64_t begin, int64_t count, int64_t step) {
    for (int64_t i = 0; i < count + kFewPad; ++i)
      places_[0][i] = matrix_ + (begin + std::min(i, count - 1)) * step;
    return {places_[0], count};
  }

  void add_values() {
    const int64_t step = p_.matrix.strides.col;
    std::fill_n(sums_, p_.rows * columns_, T(0));
    T ones[kMostProductRows];
    std::fill_n(ones, kMostProductRows, T(1));
    for (int64_t m = 0; m < p_.rows; ++m)
      gather_row(input_[m], input_.col, p_.depth, inputs_ + m * p_.depth);
    for (int64_t k = 0; k < p_.depth; k += kBlock) {
      const int64_t count = std::min(kBlock, p_.depth - k);
      for (int64_t m = 0; m < p_.rows; ++m)
        std::copy_n(inputs_ + m * p_.depth + k, count, weights_ + m * kFewStep);
      FewAhead<E> ahead = ahead_of(k + kBlock, step);
      add_few_values<E>(p_.rows, columns_, places_of(k, count, step), weights_, ones, sums_, sums_,
                        ahead);
    }
    constexpr int64_t kBoth = 2 * kLanes<T>;
    for (int64_t m = 0; m < p_.rows; ++m)
      for (int64_t n = 0; n + kBoth <= columns_; n += kBoth)
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
  const E* const matrix_;  // its first row, or column, of the item
  const E* const next_;    // and of the next item
  const int64_t columns_;  // of the item
  RowDots<E> dots_;
  T* const inputs_;            // [M, K]
  const E** const places_[2];  // of the rows that are multiplied, and of those that are fetched
  T* const weights_;           // [M, kFewStep], of a block
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
