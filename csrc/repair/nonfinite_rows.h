// A block of rows (kGradRows) of query or grad_output, separated into finite numbers and the codes
// of the others (counts.h), as nonfinite_keys.h does with keys.
#pragma once

#include "repair/counts.h"

namespace qkv::QKV_ISA {

// Separates rows [count, step] and their codes [count, step]. If all rows are finite, no code is
// written. Returns the smallest range that has all rows that are not finite.
template <Infinities infinities, class E, class C>
Range separate_rows(int64_t count, int64_t step, E* rows, C* codes) {
  Range nonfinite;
  if (all_finite(rows, count * step)) return nonfinite;
  for (int64_t r = 0; r < count; ++r) {
    if (!separate_numbers<infinities>(step, rows + r * step, codes + r * step)) continue;
    if (nonfinite.is_empty()) nonfinite.begin = r;
    nonfinite.end = r + 1;
  }
  return nonfinite;
}

// The rows of grad_output or query for the products dV += P^T dO and dK += dS^T Q. A product
// multiplies rows that separate() has made finite, and add() adds what the other numbers make of
// it. Exists only where pairs can be hidden.
template <class E, Infinities infinities>
class NonfiniteRows {
  using T = Compute<E>;

 public:
  NonfiniteRows(Arena& arena, int64_t dim)
      : columns_(padded<T>(dim)),
        codes_(arena, kGradRows, dim),
        operand_(arena),
        counts_(arena.take<T>(kKeyBlock * columns_)) {}

  // Writes 0 in place of the numbers in the first `count` of the rows that are not finite. Returns
  // whether there were none.
  bool separate(RowOperand<E>& rows, int64_t count) {
    rows_ = separate_rows<infinities>(count, rows.step(), rows.natural(), codes_.natural());
    if (rows_.is_empty()) return true;
    rows.zip(count);
    codes_.zip(count);
    return false;
  }

  // sums [keys, padded(dim)] += what the numbers that are not finite add, in rows [lane, lane +
  // rows) of the block. marks [keys x kGradRows] begin with that lane, a multiple of
  // kDepthMultiple<E>.
  void add(int64_t lane, int64_t rows, int64_t keys, const T* marks, T* sums) const {
    constexpr int64_t kMultiple = kDepthMultiple<E>;
    const int64_t skipped = std::max<int64_t>(0, rows_.begin - lane) / kMultiple * kMultiple;
    const int64_t begin = lane + skipped, end = std::min(lane + rows, rows_.end);
    if (begin >= end) return;
    operand_.each(marks + skipped, keys, end - begin, false, [&](const auto& a) {
      multiply(a, codes_.rows(begin), columns_, Sum<T>{counts_, columns_, Beta::zero});
    });
    add_counted<infinities>(keys * columns_, counts_, sums);
  }

 private:
  int64_t columns_;
  RowOperand<E> codes_;
  TileAsA<E> operand_;
  T* counts_;   // [keys, padded(dim)], scratch: sums of mark * code
  Range rows_;  // the rows with a number that is not finite
};

}  // namespace qkv::QKV_ISA
