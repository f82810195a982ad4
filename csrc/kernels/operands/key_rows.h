// The rows of key or value, as the matrices that products read.
#pragma once

#include "kernels/operands/rows.h"

namespace qkv::QKV_ISA {

// A matrix of any strides, in elements: the left-hand operand A of a product (gemm/tile_gemm.h).
template <class T>
struct Matrix {
  const T* data;
  int64_t row, col;

  // The matrix without its first r rows.
  Matrix from(int64_t r) const { return {data + r * row, row, col}; }
};

// The rows of key or value of one plane: S rows of `dim` elements of type E, in one tensor or in
// pages (attention.h).
template <class E>
class KeyRows {
  using T = Compute<E>;

 public:
  KeyRows() = default;
  KeyRows(const Problem& p, const Input& input, int64_t page_stride, int64_t dim, int64_t batch,
          int64_t kv_head)
      : first_(plane<E>(p, input, batch, kv_head)),
        row_(input.strides.row),
        col_(input.strides.col),
        dim_(dim),
        pages_(p.pages),
        page_stride_(page_stride) {}

  // Rows that lie in dense memory, `row` elements apart, of which the first counts as row `key`.
  KeyRows(const E* rows, int64_t key, int64_t row, int64_t dim)
      : first_(rows - key * row), row_(row), col_(1), dim_(dim) {}

  // Rows [key, key + keys) as an operand. They are read where they are if they have the compute
  // type and lie in one run, that is, in one page; else they are copied to scratch [keys,
  // padded(dim)].
  Matrix<T> read(int64_t key, int64_t keys, T* scratch) const {
    if constexpr (!kIsHalf<E>)
      if (run_end(key) >= key + keys) return {at(key), row_, col_};
    const int64_t step = padded<T>(dim_);
    for_each_run(key, keys, [&](int64_t first, int64_t count) {
      const E* from = at(first);
      for (int64_t j = 0; j < count; ++j)
        gather_row(from + j * row_, col_, dim_, scratch + (first - key + j) * step);
    });
    return {scratch, step, 1};
  }

  // Calls f(first, count) for each run of rows [first, first + count) that are row() apart.
  template <class F>
  QKV_INLINE void for_each_run(int64_t key, int64_t keys, const F& f) const {
    for (int64_t j = key; j < key + keys;) {
      const int64_t end = std::min(key + keys, run_end(j));
      f(j, end - j);
      j = end;
    }
  }

  const E* at(int64_t key) const {
    if (!pages_.table) return first_ + key * row_;
    return first_ + pages_.table[key / pages_.size] * page_stride_ + key % pages_.size * row_;
  }
  // Rows [key, run_end(key)) are row() apart.
  int64_t run_end(int64_t key) const {
    if (!pages_.table) return std::numeric_limits<int64_t>::max();
    return (key / pages_.size + 1) * pages_.size;
  }
  int64_t row() const { return row_; }
  int64_t col() const { return col_; }

 private:
  const E* first_ = nullptr;
  int64_t row_ = 0, col_ = 0, dim_ = 0;
  Pages pages_;
  int64_t page_stride_ = 0;
};

template <class E>
KeyRows<E> key_rows(const Problem& p, int64_t batch, int64_t kv_head) {
  return {p, p.key, p.pages.key_stride, p.head_dim, batch, kv_head};
}
template <class E>
KeyRows<E> value_rows(const Problem& p, int64_t batch, int64_t kv_head) {
  return {p, p.value, p.pages.value_stride, p.head_dim_v, batch, kv_head};
}

// Whether KeyRows::read may copy, and so needs scratch memory.
template <class E>
bool copies_keys(const Problem& p) {
  return kIsHalf<E> || p.pages.table;
}

}  // namespace qkv::QKV_ISA
