// Copies between the user's rows, which have any strides, and rows in scratch memory, which are
// dense and padded with zeros to whole vectors.
#pragma once

#include "kernels/simd/halves.h"
#include "kernels/simd/vec.h"

namespace qkv::QKV_ISA {

template <class T>
constexpr int64_t padded(int64_t dim) {
  return (dim + kLanes<T> - 1) / kLanes<T> * kLanes<T>;
}

// The rows of one plane (dispatch/kernel_table.h) in a [B..., H, L, dim] tensor. rows[r] points to
// the first element of row r; its elements are `col` apart.
template <class T>
struct Rows {
  T* data;
  int64_t group, head, row, col;

  T* operator[](int64_t r) const {
    return group == 1 ? data + r * row : data + r % group * head + r / group * row;
  }
};

// to [W] = where rows begin, begin + 1, ... are; after `count` of them, where the last one is.
template <class T, int W>
QKV_INLINE void row_addresses(const Rows<T>& rows, int64_t begin, int count, T* (&to)[W]) {
  if (rows.group > 1) {
    for (int r = 0; r < W; ++r) to[r] = rows[begin + std::min(r, count - 1)];
    return;
  }
  T* at = rows.data + begin * rows.row;
  QKV_UNROLL
  for (int r = 0; r < W; ++r) {
    to[r] = at;
    at += r + 1 < count ? rows.row : 0;
  }
}

// The rows of a tensor that has one for each query of the item.
template <class T, class Tensor>
auto rows_of(const Problem& p, const Tensor& t, Plane plane) {
  auto* const first = query_plane<T>(p, t, plane.batch, plane.kv_head * p.group());
  return Rows<std::remove_pointer_t<decltype(first)>>{first, p.group(), t.strides.head,
                                                      t.strides.row, t.strides.col};
}
// Those of a tensor [B..., H, L, S], which begins with the item's first query and key.
template <class T, class Tensor>
auto score_rows_of(const Problem& p, const Tensor& t, Plane plane) {
  auto* const first = qkv::plane<T>(p, t, plane.batch, plane.kv_head * p.group());
  return Rows<std::remove_pointer_t<decltype(first)>>{first, p.group(), t.strides.head,
                                                      t.strides.row, t.strides.col};
}

// to[0 .. padded(dim)) = the `dim` elements of one row, widened to the compute type, and zeros.
template <class E, class T = Compute<E>>
QKV_INLINE void gather_row(const E* from, int64_t col, int64_t dim, T* to) {
  int64_t d = 0;
  if (col == 1)
    for (; d + kLanes<T> <= dim; d += kLanes<T>) store(to + d, load_wide(from + d));
  for (; d < dim; ++d) to[d] = widen(from[d * col]);
  for (; d < padded<T>(dim); ++d) to[d] = 0;
}

// to [count, padded(dim)] = rows [begin, begin + valid), widened, and below them rows of zeros.
template <class E, class T = Compute<E>>
void gather_rows(Rows<const E> rows, int64_t begin, int64_t valid, int64_t count, int64_t dim,
                 T* to) {
  const int64_t step = padded<T>(dim);
  for (int64_t r = 0; r < valid; ++r) gather_row(rows[begin + r], rows.col, dim, to + r * step);
  std::fill(to + valid * step, to + count * step, T(0));
}

// Writes one row of `dim` elements to the user's memory, rounded. number(at) is what belongs to an
// element, or to a vector of them; at(row) is that element, or vector, of a row in scratch memory.
template <class E, class Number, class T = Compute<E>>
QKV_INLINE void store_row(int64_t dim, E* to, int64_t col, const Number& number) {
  int64_t d = 0;
  if (col == 1)
    for (; d + kLanes<T> <= dim; d += kLanes<T>)
      store_narrow(to + d, without_negative_zero(number(
                               [d](const T* row) QKV_INLINE_LAMBDA { return load(row + d); })));
  for (; d < dim; ++d)
    to[d * col] = narrow<E>(
        without_negative_zero(number([d](const T* row) QKV_INLINE_LAMBDA { return row[d]; })));
}

}  // namespace qkv::QKV_ISA
