// The marks of a tile's pairs (counts.h), [keys x lanes, tile.step apart].
namespace qkv::QKV_ISA {

// Whether the mask or positions can hide one of these keys from one of the tile's rows.
inline bool hides_pairs(const Problem& p, const Tile& tile, int64_t key, int64_t keys) {
  return p.mask_type != MaskType::none ||
         hides_positions(p, tile.first, tile.last, key, key + keys);
}

// Marks of keys [key, key + keys), whose weights are `step` elements apart; whether a pair is
// hidden. What is in `cleared`, laid out like the weights, becomes 0 where one is.
template <class T, size_t N = 0>
bool mark_pairs(const Problem& p, const Tile& tile, int64_t key, int64_t keys, const T* weights,
                int64_t step, T* marks, const std::array<T*, N>& cleared = {}) {
  for (int64_t j = 0; j < keys; ++j)
    for (int v = 0; v < tile.lanes; v += kLanes<T>) store(marks + j * tile.step + v, Vec<T>{});
  hide_pairs(p, tile, key, keys, marks);
  const Vec<T> hidden{}, positive = splat(T(kPositive)), makes_nan = splat(T(kMakesNaN));
  Vec<T> count{};
  for (int64_t j = 0; j < keys; ++j)
    for (int v = 0; v < tile.lanes; v += kLanes<T>) {
      T* const mark = marks + j * tile.step + v;
      const int64_t at = j * step + v;
      const Vec<T> visible = load(weights + at) > 0 ? positive : makes_nan;
      const auto is_hidden = load(mark) == -kInfinity<T>;
      store(mark, is_hidden ? hidden : visible);
      count += is_hidden ? positive : hidden;
      QKV_UNROLL
      for (size_t i = 0; i < N; ++i)
        store(cleared[i] + at, is_hidden ? hidden : load(cleared[i] + at));
    }
  return any_nonzero<T>(count);
}

// The marks of a tile's pairs with keys that are not finite, [slots x lanes]: such keys lie one
// after the other, the n-th of them in slot n (PartedKeys in nonfinite_keys.h, which `Keys` is).
template <class T>
class SlotMarks {
 public:
  SlotMarks(Arena& arena, const Problem& p)
      : marks_(arena.take<T>(hides_any(p) ? kKeyBlock * kRowBlock<T> : 0)) {}

  // Marks the pairs with those among keys [key, end). The tile has weights of the first `keys` of
  // these; pairs with the rest are hidden. Returns whether any pair is.
  template <class Keys>
  bool mark(const Problem& p, const Keys& parted, Tile tile, int64_t key, int64_t keys, int64_t end,
            const T* weights) {
    const int64_t step = tile.step, first = parted.slot(key), last = parted.slot(key + keys);
    tile.step = tile.lanes;
    begin_ = first / 2 * 2, end_ = parted.slot(end);
    std::fill(row(begin_, tile), row(first, tile), T(0));
    bool hidden = end_ > last;
    for (int64_t slot = first, next; slot < last; slot = next) {
      for (next = slot + 1; next < last && parted.key(next) <= parted.key(next - 1) + kNear;)
        ++next;
      const int64_t from = parted.key(slot), count = parted.key(next - 1) + 1 - from;
      mark_pairs(p, tile, from, count, weights + (from - key) * step, step, row(slot, tile));
      hidden |= keep_slots(parted, tile, slot, next);
    }
    std::fill(row(last, tile), row(end_, tile), T(0));
    return hidden;
  }

  const T* data() const { return marks_; }
  int64_t begin() const { return begin_; }  // an even slot; that of a key before has marks of 0
  int64_t count() const { return end_ - begin_; }

 private:
  // Keys this close to each other are marked by one call, together with the finite ones between
  // them: a call costs as much as a few keys. The number is a guess, not tuned.
  static constexpr int64_t kNear = 8;

  T* row(int64_t slot, const Tile& tile) const { return marks_ + (slot - begin_) * tile.lanes; }

  // Keeps, of the marks of consecutive keys, those of slots [slot, end). Returns whether a pair of
  // these is hidden.
  template <class Keys>
  bool keep_slots(const Keys& parted, const Tile& tile, int64_t slot, int64_t end) const {
    const T* const marks = row(slot, tile);
    const int64_t first = parted.key(slot);
    Vec<T> hidden{};
    for (; slot < end; ++slot)
      for (int v = 0; v < tile.lanes; v += kLanes<T>) {
        const Vec<T> mark = load(marks + (parted.key(slot) - first) * tile.lanes + v);
        hidden += mark == 0 ? splat(T(1)) : Vec<T>{};
        store(row(slot, tile) + v, mark);
      }
    return any_nonzero<T>(hidden);
  }

  T* marks_;
  int64_t begin_ = 0, end_ = 0;
};

}  // namespace qkv::QKV_ISA
