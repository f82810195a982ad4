// Rows of key or value, parted into finite numbers and the codes of all others (counts.h).
namespace qkv::QKV_ISA {

// At most kKeyBlock rows of [S, dim]; the codes are kept as C.
template <class E, class C>
class PartedKeys {
  using T = Compute<E>;

 public:
  // Memory only where pairs can be hidden.
  PartedKeys(Arena& arena, const Problem& p, int64_t dim)
      : dim_(dim),
        step_(padded<T>(dim)),
        row_(arena.take<T>(hides_any(p) ? step_ : 0)),
        used_(arena.take<T>(hides_any(p) ? step_ : 0)),
        finite_(arena.take<E>(hides_any(p) ? kKeyBlock * step_ : 0)),
        codes_(arena.take<C>(hides_any(p) ? kKeyBlock * step_ : 0)) {}

  // Rows [key, key + keys), unless they are those of the last call.
  void part(const KeyRows<E>& rows, int64_t key, int64_t keys) {
    if (first_ == key && count_ == keys) return;
    first_ = key, count_ = keys;
    keys_ = columns_ = {};
    std::fill_n(used_, step_, T(0));
    for (int64_t j = 0; j < keys; ++j) {
      gather_row(rows.at(key + j), rows.col(), dim_, row_);
      if (part_row(finite_ + j * step_, codes_ + j * step_)) keys_.include(key + j);
    }
    for (int64_t d = 0; d < step_ && !keys_.empty(); ++d)
      if (used_[d] != 0) columns_.include(d);
  }

  int64_t first() const { return first_; }
  int64_t count() const { return count_; }
  int64_t step() const { return step_; }
  const C* codes() const { return codes_; }  // [keys, step()]
  Range keys() const { return keys_; }       // those with a number that is not finite
  Range columns() const { return columns_; }
  KeyRows<E> finite() const { return {finite_, first_, step_, dim_}; }

 private:
  // Of row_. Whether it has some that are not finite.
  bool part_row(E* finite, C* codes) const {
    Vec<T> used{};
    for (int64_t d = 0; d < step_; d += kLanes<T>) {
      const Vec<T> x = load(row_ + d), code = code_of<T>(x);
      store_narrow(finite + d, code == 0 ? x : Vec<T>{});
      store_narrow(codes + d, code);
      store(used_ + d, max<T>(load(used_ + d), code));
      used += code;
    }
    return any_nonzero<T>(used);
  }

  int64_t dim_, step_;
  T *row_, *used_;  // scratch, and the largest code of each column
  E* finite_;
  C* codes_;
  int64_t first_ = 0, count_ = 0;
  Range keys_, columns_;
};

// What the products of key and value take instead of rows that are not finite.
template <class E>
class NonfiniteKeys {
  using T = Compute<E>;

 public:
  NonfiniteKeys(Arena& arena, const Problem& p, int64_t dim)
      : parted_(arena, p, dim), counts_(arena.take<T>(hides_any(p) ? dim * kRowBlock<T> : 0)) {}

  // Parts keys [key, key + keys), which are the same numbers whenever it is called; whether
  // all are finite.
  bool part(const KeyRows<E>& rows, int64_t key, int64_t keys) {
    parted_.part(rows, key, keys);
    return parted_.keys().empty();
  }
  // Whether those are what it has parted, and they are not all finite.
  bool hold(int64_t key, int64_t keys) const {
    return parted_.first() == key && parted_.count() == keys && !parted_.keys().empty();
  }
  // The finite part.
  KeyRows<E> finite() const { return parted_.finite(); }

  // output [dim x lanes] += the others, of keys [key, key + keys) of those.
  void add(const Tile& tile, int64_t key, int64_t keys, const T* marks, T* output) const {
    const int64_t begin = std::max(key, parted_.keys().begin);
    const int64_t end = std::min(key + keys, parted_.keys().end);
    if (begin >= end) return;
    const Range d = parted_.columns();
    const int64_t at = (begin - parted_.first()) * parted_.step() + d.begin;
    gemm<T>(d.end - d.begin, tile.lanes,
            {end - begin, parted_.codes() + at, 1, parted_.step(), marks + (begin - key) * tile.step,
             tile.step, counts_, tile.lanes, Beta::zero, nullptr});
    add_counted(d.end - d.begin, tile.lanes, counts_, output + d.begin * tile.lanes, tile.lanes);
  }

 private:
  PartedKeys<E, T> parted_;
  T* counts_;  // scratch
};

}  // namespace qkv::QKV_ISA
