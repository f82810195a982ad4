// What is in nonfinite_keys.h and nonfinite_rows.h, for products of pairs.
namespace qkv::QKV_ISA {

template <Infinities infinities>
class NonfiniteKeys<BFloat16, infinities> {
 public:
  NonfiniteKeys(Arena& arena, const Problem& p, int64_t dim)
      : dim_(dim),
        parted_(arena, p, dim, padded_halves(dim)),
        codes_(arena, hides_any(p) ? kKeyBlock : 0, dim),
        marks_(arena.take<Pair>(hides_any(p) ? pairs_in(kKeyBlock) * kRowBlock<float> : 0)),
        counts_(arena.take<float>(hides_any(p) ? dim * kRowBlock<float> : 0)) {}

  bool part(const KeyRows<BFloat16>& rows, int64_t key, int64_t keys) {
    if (hold(key, keys)) return false;
    parted_.template part<infinities>(rows, key, keys);
    if (parted_.keys().empty()) return true;
    codes_.read({parted_.codes(key), key, parted_.step(), dim_}, key, keys);
    return false;
  }
  bool hold(int64_t key, int64_t keys) const { return parted_.hold(key, keys); }
  KeyRows<BFloat16> finite() const { return parted_.finite(); }

  // `key` is an even number of keys after the first.
  void add(const Tile& tile, int64_t key, int64_t keys, const float* marks, float* output) const {
    const int64_t skipped = std::max<int64_t>(0, parted_.keys().begin - key) / 2 * 2;
    const int64_t begin = key + skipped, end = std::min(key + keys, parted_.keys().end);
    if (begin >= end) return;
    const Matrix<Pair> codes = codes_.from(begin - parted_.first());
    pair_rows(marks + skipped * tile.step, tile.step, end - begin, tile.lanes, marks_);
    gemm_pairs(dim_, tile.lanes,
               {pairs_in(end - begin), codes.data, codes.row, codes.col, marks_, tile.lanes,
                counts_, tile.lanes, Beta::zero, nullptr});
    add_counted(dim_ * tile.lanes, counts_, output);
  }

 private:
  int64_t dim_;
  PartedKeys<BFloat16, BFloat16> parted_;
  KeyPairs codes_;
  Pair* marks_;    // scratch
  float* counts_;  // scratch
};

template <Infinities infinities>
class NonfiniteRows<BFloat16, infinities> {
 public:
  NonfiniteRows(Arena& arena, const Problem& p, int64_t dim)
      : dim_(dim),
        codes_(arena, hides_any(p) ? kGradRows : 0, dim),
        marks_(arena.take<BFloat16>(hides_any(p) ? kKeyBlock * kGradRows : 0)),
        counts_(arena.take<float>(hides_any(p) ? kKeyBlock * padded<float>(dim) : 0)) {}

  // Leaves the finite part in the first `count` rows, and zips them again.
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
    add_counted(keys * columns, counts_, sums);
  }

 private:
  int64_t dim_;
  RowPairs codes_;
  BFloat16* marks_;  // scratch
  float* counts_;    // scratch
  Range rows_;
};

}  // namespace qkv::QKV_ISA
