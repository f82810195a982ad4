// A block of rows of query or grad_output, parted in the same way.
namespace qkv::QKV_ISA {

// Rows [count, step].
template <Infinities infinities, class E, class C>
Range part_rows(int64_t count, int64_t step, E* rows, C* codes) {
  Range nonfinite;
  if (all_finite(rows, count * step)) return nonfinite;
  for (int64_t r = 0; r < count; ++r)
    if (part_numbers<infinities>(step, rows + r * step, codes + r * step)) nonfinite.include(r);
  return nonfinite;
}

// What the products dV += P^T dO and dK += dS^T Q take instead of rows that are not finite.
template <class E, Infinities infinities>
class NonfiniteRows {
  using T = Compute<E>;

 public:
  NonfiniteRows(Arena& arena, const Problem& p, int64_t dim)
      : step_(padded<T>(dim)),
        codes_(arena.take<T>(hides_any(p) ? kGradRows * step_ : 0)),
        counts_(arena.take<T>(hides_any(p) ? kKeyBlock * step_ : 0)) {}

  // Leaves the finite part in rows [count, padded(dim)]; whether that is all.
  bool part(T* rows, int64_t count) {
    rows_ = part_rows<infinities>(count, step_, rows, codes_);
    return rows_.empty();
  }

  // sums [keys, padded(dim)] += the others, of `rows` rows from `lane` on. marks [keys x
  // kGradRows], from that lane on.
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
  T *codes_, *counts_;  // [kGradRows, padded(dim)]; scratch
  Range rows_;          // those with a number that is not finite
};

}  // namespace qkv::QKV_ISA
