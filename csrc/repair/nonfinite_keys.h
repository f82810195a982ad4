// Rows of key or value, separated into finite numbers and the codes of the others (counts.h).
#pragma once

#include "repair/counts.h"
#include "repair/marks.h"

namespace qkv::QKV_ISA {

// A block of keys, [keys, step] in E, with 0 in place of every number that is not finite; and
// [slots, step] in C, the codes of the keys that have such numbers, one after the other: the n-th
// of these keys has slot n. `step` is dim, padded.
template <class E, class C>
class SeparatedKeys {
 public:
  SeparatedKeys(Arena& arena, int64_t dim, int64_t step)
      : dim_(dim),
        step_(step),
        finite_(arena.take<E>(kKeyBlock * step_)),
        codes_(arena.take<C>(kKeyBlock * step_)) {}

  // Separates rows [key, key + keys), unless they are those of the last call.
  template <Infinities infinities>
  void separate(const KeyRows<E>& rows, int64_t key, int64_t keys) {
    if (first_ == key && count_ == keys) return;
    first_ = key, count_ = keys, slots_ = 0;
    for (int64_t j = 0; j < keys; ++j) {
      E* row = finite_ + j * step_;
      copy_row(rows.at(key + j), rows.col(), row);
      if (separate_numbers<infinities>(step_, row, codes_ + slots_ * step_))
        key_[slots_++] = key + j;
    }
  }

  // Whether these keys are those of the last call, and some of them are not finite.
  bool hold(int64_t key, int64_t keys) const {
    return first_ == key && count_ == keys && slots_ > 0;
  }
  int64_t step() const { return step_; }
  KeyRows<E> finite() const { return {finite_, first_, step_, dim_}; }
  KeyRows<C> codes() const { return {codes_, 0, step_, dim_}; }
  int64_t slots() const { return slots_; }
  int64_t key(int64_t slot) const { return key_[slot]; }
  // The slot of the first key that has one, from this key on; slots() if none has.
  int64_t slot(int64_t key) const {
    return std::lower_bound(key_.begin(), key_.begin() + slots_, key) - key_.begin();
  }

 private:
  // to [step] = from [dim], and zeros beyond.
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

// Keys that a pass has loaded: an item's, or a block. Whether they are finite is asked when they
// are in the cache, for those of an item block by block, and looked up only once.
template <class E>
class LoadedKeys {
 public:
  void load(const Matrix<E>& keys, int64_t first, int64_t count, int64_t dim) {
    *this = {};
    matrix_ = keys, dim_ = dim, first_ = begin_ = end_ = first, last_ = first + count;
  }

  // Whether keys [key, end) are finite. Once some were not, the answer is false for all keys.
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
  int64_t begin_ = 0, end_ = 0;  // the keys that were looked at
  bool finite_ = true;
};

// Keys or values for products that leave out hidden pairs. A product multiplies finite() instead of
// the rows themselves; hide() then marks the pairs of one tile, and add() adds what the numbers
// that are not finite make of the visible ones. Exists only where pairs can be hidden.
template <class E, Infinities infinities>
class NonfiniteKeys {
  using T = Compute<E>;
  using N = Natural<E>;

 public:
  NonfiniteKeys(Arena& arena, int64_t dim)
      : dim_(dim),
        separated_(arena, dim, padded<N>(dim)),
        finite_(arena, kCopiesRows<E>, kKeyBlock, dim, Use::columns),
        codes_(arena, kCopiesRows<N>, kKeyBlock, dim, Use::columns),
        marks_(arena),
        operand_(arena),
        counts_(arena.take<T>(padded<T>(dim) * kTileRows<T>)) {}

  // Separates keys [key, key + keys), which must have the same numbers at every call. Returns
  // whether all are finite.
  bool separate(const KeyRows<E>& rows, int64_t key, int64_t keys) {
    if (separated_.hold(key, keys)) return false;
    separated_.template separate<infinities>(rows, key, keys);
    const bool all_finite = separated_.slots() == 0;
    // An odd key's neighbour may be in need of repair where all of these are finite: see hide().
    if (!all_finite || keys % kDepthMultiple<E> != 0) finite_.load(separated_.finite(), key, keys);
    if (!all_finite) codes_.load(separated_.codes(), 0, separated_.slots());
    return all_finite;
  }
  // Keys [key, key + keys) with 0 in place of what is not finite, as KeyOperand::columns has them.
  LeftOperand<Factor<E>> finite(int64_t key, int64_t keys) const {
    return finite_.columns(key, keys);
  }

  // Marks the pairs with the keys among [key, key + keys) that are not finite; weights [keys x
  // lanes]. Returns whether one of these keys is hidden from a row of the tile. In products of
  // pairs an odd key's neighbour is hidden, too: it is multiplied by 0.
  bool hide(const Problem& p, const Tile& tile, int64_t key, int64_t keys, const T* weights) {
    const int64_t end = key + touched_keys(keys, kDepthMultiple<E>);
    return marks_.mark(p, separated_, tile, key, keys, end, weights);
  }
  // output [dim x lanes], or [rows x dim] if it is in rows, += what the visible pairs of the last
  // hide() add.
  void add(Tile tile, bool in_rows, T* output) const {
    if (marks_.count() == 0) return;
    const LeftOperand<Factor<E>> codes = codes_.columns(marks_.begin(), marks_.count());
    tile.step = tile.lanes;
    operand_.each(tile, marks_.data(), marks_.count(), codes.depth, false, [&](const auto& b) {
      if (in_rows)
        multiply_by_rows(codes, b, tile.rows, counts_, Beta::zero);
      else
        multiply(codes, b, tile.lanes, Sum<T>{counts_, tile.lanes, Beta::zero});
    });
    add_counted<infinities>(dim_ * (in_rows ? tile.rows : tile.lanes), counts_, output);
  }

 private:
  int64_t dim_;
  SeparatedKeys<E, N> separated_;
  KeyOperand<E> finite_;
  KeyOperand<N> codes_;
  SlotMarks<T> marks_;
  TileAsB<E> operand_;
  T* counts_;  // [dim x lanes], scratch: sums of mark * code
};

}  // namespace qkv::QKV_ISA
