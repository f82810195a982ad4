// A block of rows (kGradRows) of query or grad_output, separated into finite numbers and the codes
// of the others (counts.h), as nonfinite_keys.h does with keys.
namespace qkv::QKV_ISA {

// Separates rows [count, step] and their codes [count, step]. If all rows are finite, no code is
// written. Returns the range of rows that are not finite.
template <Infinities infinities, class E, class C>
Range part_rows(int64_t count, int64_t step, E* rows, C* codes) {
  Range nonfinite;
  if (all_finite(rows, count * step)) return nonfinite;
  for (int64_t r = 0; r < count; ++r)
    if (part_numbers<infinities>(step, rows + r * step, codes + r * step)) nonfinite.include(r);
  return nonfinite;
}

// The rows of grad_output or query for the products dV += P^T dO and dK += dS^T Q. A product
// multiplies rows that part() has made finite, and add() adds what the other numbers make of it.
template <class E, Infinities infinities>
class NonfiniteRows {
  using T = Compute<E>;

 public:
  NonfiniteRows(Arena& arena, const Problem& p, int64_t dim)
      : step_(padded<T>(dim)),
        codes_(arena.take<T>(hides_any(p) ? kGradRows * step_ : 0)),
        counts_(arena.take<T>(hides_any(p) ? kKeyBlock * step_ : 0)) {}

  // Writes 0 in place of the numbers in rows [count, padded(dim)] that are not finite. Returns
  // whether there were none.
  bool part(T* rows, int64_t count) {
    rows_ = part_rows<infinities>(count, step_, rows, codes_);
    return rows_.empty();
  }

  // sums [keys, padded(dim)] += what the numbers that are not finite add, in rows [lane, lane +
  // rows) of the block. marks [keys x kGradRows] begin with that lane.
  void add(int64_t lane, int64_t rows, int64_t keys, const T* marks, T* sums) const {
    const int64_t begin = std::max(lane, rows_.begin), end = std::min(lane + rows, rows_.end);
    if (begin >= end) return;
    gemm<T>(keys, step_,
            {end - begin, marks + begin - lane, kGradRows, 1, codes_ + begin * step_, step_,
             counts_, step_, Beta::zero, nullptr});
    add_counted<infinities>(keys * step_, counts_, sums);
  }

 private:
  int64_t step_;
  T* codes_;    // [kGradRows, padded(dim)]
  T* counts_;   // [keys, padded(dim)], scratch: sums of mark * code
  Range rows_;  // the rows with a number that is not finite
};

}  // namespace qkv::QKV_ISA
