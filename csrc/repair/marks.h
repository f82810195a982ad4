// The marks of a tile's pairs (counts.h): [keys x lanes], with tile.step elements from key to key.
#pragma once

#include "kernels/score/masks.h"
#include "repair/counts.h"

namespace qkv::QKV_ISA {

// marks [keys x lanes] = the marks of the tile's pairs with keys [key, key + keys). weights [keys x
// lanes] have `step` elements from key to key. Matrices in `cleared`, laid out like the weights,
// become 0 where a pair is hidden. Returns whether any pair is.
template <class T, size_t N = 0>
bool mark_pairs(const Problem& p, const Tile& tile, int64_t key, int64_t keys, const T* weights,
                int64_t step, T* marks, const std::array<T*, N>& cleared = {}) {
  clear_tile(tile, keys, marks);
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

// The marks of a tile's pairs with keys that are not finite, [slots x lanes]. Such keys lie one
// after the other, the n-th of them in slot n (SeparatedKeys in nonfinite_keys.h; the template
// parameter Keys below is that class).
template <class T>
class SlotMarks {
 public:
  explicit SlotMarks(Arena& arena) : marks_(arena.take<T>(kKeyBlock * kTileRows<T>)) {}

  // Marks the pairs with the keys among [key, end) that are not finite. `weights` has the weights
  // of the first `keys` of these keys; pairs with the keys after them are hidden. Returns whether
  // any pair is.
  template <class Keys>
  bool mark(const Problem& p, const Keys& separated, Tile tile, int64_t key, int64_t keys,
            int64_t end, const T* weights) {
    const int64_t step = tile.step, first = separated.slot(key), last = separated.slot(key + keys);
    tile.step = tile.lanes;
    begin_ = first / 2 * 2, end_ = separated.slot(end);
    std::fill(row(begin_, tile), row(first, tile), T(0));
    bool hidden = end_ > last;
    for (int64_t slot = first, next; slot < last; slot = next) {  // neighbours by one call
      const int64_t from = separated.key(slot);
      for (next = slot + 1; next < last && separated.key(next) == from + (next - slot);) ++next;
      hidden |= mark_pairs(p, tile, from, next - slot, weights + (from - key) * step, step,
                           row(slot, tile));
    }
    std::fill(row(last, tile), row(end_, tile), T(0));
    return hidden;
  }

  const T* data() const { return marks_; }
  // The slot of the first mark. It is even; if it is that of a key before [key, end), its marks are
  // 0.
  int64_t begin() const { return begin_; }
  int64_t count() const { return end_ - begin_; }

 private:
  T* row(int64_t slot, const Tile& tile) const { return marks_ + (slot - begin_) * tile.lanes; }

  T* marks_;
  int64_t begin_ = 0, end_ = 0;
};

}  // namespace qkv::QKV_ISA
