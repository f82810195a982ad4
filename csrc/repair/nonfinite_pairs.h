// The classes of nonfinite_keys.h and nonfinite_rows.h for products of pairs of bf16
// (kernels/gemm/pairs.h). Their functions do the same, but for what is said here.
namespace qkv::QKV_ISA {

template <Infinities infinities>
class NonfiniteKeys<BFloat16, infinities> {
 public:
  NonfiniteKeys(Arena& arena, const Problem& p, int64_t dim)
      : dim_(dim),
        parted_(arena, p, dim, padded_halves(dim)),
        codes_(arena, hides_any(p) ? kKeyBlock : 0, dim),
        marks_(arena, p),
        zipped_(arena.take<Pair>(hides_any(p) ? padded<Pair>(pairs_in(kKeyBlock)) * kRowBlock<float>
                                              : 0)),
        counts_(arena.take<float>(hides_any(p) ? padded<float>(dim) * kRowBlock<float> : 0)) {}

  bool part(const KeyRows<BFloat16>& rows, int64_t key, int64_t keys) {
    if (hold(key, keys)) return false;
    parted_.template part<infinities>(rows, key, keys);
    if (parted_.slots() == 0) return true;
    codes_.read(parted_.codes(), 0, parted_.slots());
    return false;
  }
  bool hold(int64_t key, int64_t keys) const { return parted_.hold(key, keys); }
  KeyRows<BFloat16> finite() const { return parted_.finite(); }

  // If the number of keys is odd, the key behind the last one is in the same pair of bf16, and is
  // hidden, so that it is multiplied by 0.
  bool hide(const Problem& p, const Tile& tile, int64_t key, int64_t keys, const float* weights) {
    return marks_.mark(p, parted_, tile, key, keys, key + 2 * pairs_in(keys), weights);
  }
  void add(const Tile& tile, float* output) const {
    const int64_t begin = marks_.begin(), count = marks_.count();
    if (count == 0) return;
    const Matrix<Pair> codes = codes_.from(begin);
    const int64_t depth = codes_.depth(begin, count);
    pair_rows(marks_.data(), tile.lanes, count, tile.lanes, zipped_);
    pad_pairs(zipped_, tile.lanes, count, depth);
    gemm_pairs(product_rows(dim_), tile.lanes,
               {depth, codes.data, codes.row, codes.col, zipped_, tile.lanes, counts_, tile.lanes,
                Beta::zero, nullptr});
    add_counted<infinities>(dim_ * tile.lanes, counts_, output);
  }

 private:
  int64_t dim_;
  PartedKeys<BFloat16, BFloat16> parted_;
  KeyPairs codes_;
  SlotMarks<float> marks_;
  Pair* zipped_;   // [pairs of slots x lanes], scratch: the marks
  float* counts_;  // [dim x lanes], scratch: sums of mark * code
};

template <Infinities infinities>
class NonfiniteRows<BFloat16, infinities> {
 public:
  NonfiniteRows(Arena& arena, const Problem& p, int64_t dim)
      : dim_(dim),
        codes_(arena, hides_any(p) ? kGradRows : 0, dim),
        marks_(arena.take<BFloat16>(hides_any(p) ? kKeyBlock * kGradRows : 0)),
        counts_(arena.take<float>(hides_any(p) ? kKeyBlock * padded<float>(dim) : 0)) {}

  // Also zips the rows again if they were not finite.
  bool part(const RowPairs& rows, int64_t count) {
    rows_ = part_rows<infinities>(count, padded_halves(dim_), rows.natural(), codes_.natural());
    if (rows_.empty()) return true;
    rows.zip(count);
    codes_.zip(count);
    return false;
  }

  // `lane` is even.
  void add(int64_t lane, int64_t rows, int64_t keys, const float* marks, float* sums) const {
    const int64_t skipped = std::max<int64_t>(0, rows_.begin - lane) / 2 * 2;
    const int64_t begin = lane + skipped, end = std::min(lane + rows, rows_.end);
    if (begin >= end) return;
    const int64_t columns = padded<float>(dim_);
    narrow_rows(marks + skipped, kGradRows, keys, end - begin, marks_, kGradRows);
    gemm_pairs(keys, columns,
               {pairs_in(end - begin), reinterpret_cast<const Pair*>(marks_), kGradRows / 2, 1,
                codes_.zipped(begin), padded_halves(dim_), counts_, columns, Beta::zero, nullptr});
    add_counted<infinities>(keys * columns, counts_, sums);
  }

 private:
  int64_t dim_;
  RowPairs codes_;
  BFloat16* marks_;  // [keys x kGradRows], scratch
  float* counts_;    // [keys, padded(dim)], scratch: sums of mark * code
  Range rows_;
};

}  // namespace qkv::QKV_ISA
