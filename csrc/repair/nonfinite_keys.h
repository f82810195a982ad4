// Rows of key or value, parted into finite numbers and the codes of the others (counts.h).
namespace qkv::QKV_ISA {

// At most kKeyBlock rows of E, [keys, step], and the codes in C of those that are not all finite,
// one after the other: the n-th of them has slot n.
template <class E, class C>
class PartedKeys {
 public:
  // Memory only where pairs can be hidden.
  PartedKeys(Arena& arena, const Problem& p, int64_t dim, int64_t step)
      : dim_(dim),
        step_(step),
        finite_(arena.take<E>(hides_any(p) ? kKeyBlock * step_ : 0)),
        codes_(arena.take<C>(hides_any(p) ? kKeyBlock * step_ : 0)) {}

  // Rows [key, key + keys), unless they are those of the last call.
  template <Infinities infinities>
  void part(const KeyRows<E>& rows, int64_t key, int64_t keys) {
    if (first_ == key && count_ == keys) return;
    first_ = key, count_ = keys, slots_ = 0;
    for (int64_t j = 0; j < keys; ++j) {
      E* row = finite_ + j * step_;
      copy_row(rows.at(key + j), rows.col(), row);
      if (part_numbers<infinities>(step_, row, codes_ + slots_ * step_)) key_[slots_++] = key + j;
    }
  }

  // Whether these have been parted, and there are some that are not finite.
  bool hold(int64_t key, int64_t keys) const {
    return first_ == key && count_ == keys && slots_ > 0;
  }
  int64_t step() const { return step_; }
  KeyRows<E> finite() const { return {finite_, first_, step_, dim_}; }
  KeyRows<C> codes() const { return {codes_, 0, step_, dim_}; }
  int64_t slots() const { return slots_; }
  int64_t key(int64_t slot) const { return key_[slot]; }
  // Of the first key from this one on.
  int64_t slot(int64_t key) const {
    return std::lower_bound(key_.begin(), key_.begin() + slots_, key) - key_.begin();
  }

 private:
  // Zeros beyond dim.
  void copy_row(const E* from, int64_t col, E* to) const {
    if (col == 1)
      std::memcpy(to, from, size_t(dim_) * sizeof *to);
    else
      for (int64_t d = 0; d < dim_; ++d) to[d] = from[d * col];
    std::fill(to + dim_, to + step_, E{});
  }

  int64_t dim_, step_;
  E* finite_;
  C* codes_;
  int64_t first_ = 0, count_ = 0, slots_ = 0;
  std::array<int64_t, kKeyBlock> key_;
};

// The keys of an item of the backward pass, looked at when they are in the cache.
template <class E>
class LoadedKeys {
 public:
  void load(const Matrix<E>& keys, int64_t first, int64_t count, int64_t dim) {
    *this = {};
    matrix_ = keys, dim_ = dim, first_ = begin_ = end_ = first, last_ = first + count;
  }

  // Whether keys [key, end) are finite; false of all once some were not.
  bool are_finite(int64_t key, int64_t end) {
    end = std::min(end, last_);
    if (key < begin_ || key > end_) begin_ = end_ = key;
    if (finite_ && end > end_) {
      finite_ = all_finite(matrix_.from(end_ - first_), end - end_, dim_);
      end_ = end;
    }
    return finite_;
  }

 private:
  Matrix<E> matrix_{};
  int64_t dim_ = 0, first_ = 0, last_ = 0;
  int64_t begin_ = 0, end_ = 0;  // those that were looked at
  bool finite_ = true;
};

// What products with keys or values take instead of rows that are not finite.
template <class E, Infinities infinities>
class NonfiniteKeys {
  using T = Compute<E>;

 public:
  NonfiniteKeys(Arena& arena, const Problem& p, int64_t dim)
      : dim_(dim),
        parted_(arena, p, dim, padded<T>(dim)),
        marks_(arena, p),
        counts_(arena.take<T>(hides_any(p) ? dim * kRowBlock<T> : 0)) {}

  // Parts keys [key, key + keys), the same numbers at every call; whether all are finite.
  bool part(const KeyRows<E>& rows, int64_t key, int64_t keys) {
    parted_.template part<infinities>(rows, key, keys);
    return parted_.slots() == 0;
  }
  // Whether these were parted, and not all are finite.
  bool hold(int64_t key, int64_t keys) const { return parted_.hold(key, keys); }
  // The finite part.
  KeyRows<E> finite() const { return parted_.finite(); }

  // Marks the pairs with those among keys [key, key + keys) that are not finite. Returns whether
  // one of them is hidden from a row of the tile.
  bool hide(const Problem& p, const Tile& tile, int64_t key, int64_t keys, const T* weights) {
    return marks_.mark(p, parted_, tile, key, keys, key + keys, weights);
  }
  // output [dim x lanes] += what the visible pairs that hide() marked add.
  void add(const Tile& tile, T* output) const {
    if (marks_.count() == 0) return;
    gemm<T>(dim_, tile.lanes,
            {marks_.count(), parted_.codes().at(marks_.begin()), 1, parted_.step(), marks_.data(),
             tile.lanes, counts_, tile.lanes, Beta::zero, nullptr});
    add_counted<infinities>(dim_ * tile.lanes, counts_, output);
  }

 private:
  int64_t dim_;
  PartedKeys<E, T> parted_;
  SlotMarks<T> marks_;
  T* counts_;  // scratch
};

}  // namespace qkv::QKV_ISA
