// What products of few rows with a matrix from memory (row_dots.h, row_sums.h) have in common: how
// their rows are packed, and how the matrix is fetched.
#pragma once

#include "kernels/operands/operand.h"
#include "kernels/operands/rows.h"
#include "row_product.h"

namespace qkv::QKV_ISA {

// Two vectors of the compute type, or one of pairs.
template <class E>
constexpr int64_t kRowUnit = 2 * kLanes<Compute<E>>;
template <class E>
constexpr int64_t whole_units(int64_t n) {
  return (n + kRowUnit<E> - 1) / kRowUnit<E> * kRowUnit<E>;
}

// to [whole_units(dim)] = the `dim` elements of a row, `col` apart, as they are multiplied; zeros.
template <class E>
QKV_INLINE void pack_row(const E* from, int64_t col, int64_t dim, Natural<E>* to) {
  std::fill_n(to, whole_units<E>(dim), Natural<E>{});
  if constexpr (kInPairs<E>)
    copy_row(from, col, dim, to);
  else
    gather_row(from, col, dim, to);
}

// How many bytes ahead of what is multiplied pages are looked up, and a matrix is fetched. With 16
// KiB instead of 32, products with a matrix take 0.98 to 1.05 of the time (Zen 5).
constexpr int64_t kPage = 4096, kRowAhead = 8 * kPage;

// Has the CPU look up where the pages of these bytes lie, which are read soon: from one page to the
// next it fetches nothing by itself. On a virtual Zen 5 with pages of 4 KiB, a matrix from memory
// takes 0.7 to 0.9 of the time with it.
template <class E>
QKV_INLINE void touch_pages(const E* from, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += kPage)
    __builtin_prefetch(reinterpret_cast<const char*>(from) + i);
}

// Where numbers are multiplied more often than this, reading them is no longer what takes the time,
// and the CPU fetches too late what comes next. All lines are fetched then: a matrix from memory
// takes 0.7 to 0.8 of the time, one in the second-level cache 1.2 (Zen 5).
constexpr bool fetches_lines(int64_t rows) { return rows > 2; }

}  // namespace qkv::QKV_ISA
