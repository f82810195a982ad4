// Fetching into the second-level cache what the forward pass will read or write soon.
//
// The hardware looks ahead along one run of memory. Each item begins four new ones, of queries,
// keys, values and output, each of a few KiB, and waits for each line of them.
#pragma once

#include "kernels/passes/forward_few_rows.h"
#include "kernels/passes/forward_tiles.h"

namespace qkv::QKV_ISA {

// Rows that are asked for a few at a time, since a core waits if it has some 20 requests open.
class RowsAhead {
 public:
  void clear() { count_ = at_ = 0, rows_ = share_ = 0; }

  // Adds `rows` rows of `dim` elements, `step` elements apart. Those whose elements are not side by
  // side are left out, and so is what there is no room for.
  template <class E>
  void add(const E* data, int64_t step, int64_t col, int64_t dim, int64_t rows) {
    if (!data || col != 1 || rows <= 0 || count_ == kPieces) return;
    pieces_[count_++] = {reinterpret_cast<const char*>(data), step * int64_t(sizeof(E)),
                         dim * int64_t(sizeof(E)), rows};
    rows_ += rows;
  }

  // ask() will be called so many times.
  void spread(int64_t times) { share_ = (rows_ + times - 1) / times; }

  void ask() {
    for (int64_t left = share_; left > 0 && at_ < count_;) {
      Piece& piece = pieces_[at_];
      const int64_t rows = std::min(left, piece.rows);
      for (int64_t r = 0; r < rows; ++r, piece.data += piece.step)
        for (int64_t b = 0; b < piece.bytes; b += 2 * int64_t(kCacheLine)) {
          __builtin_prefetch(piece.data + b, 0, 2);
          __builtin_prefetch(piece.data + b + kCacheLine, 0, 2);
        }
      left -= rows;
      piece.rows -= rows;
      if (piece.rows == 0) ++at_;
    }
    // GCC 12 takes a function that does nothing but this for one without effects.
    asm volatile("");
  }

 private:
  struct Piece {
    const char* data;
    int64_t step, bytes, rows;
  };
  // Output and queries of 8 heads that share keys and values, and these.
  static constexpr int kPieces = 18;

  Piece pieces_[kPieces];
  int count_ = 0, at_ = 0;
  int64_t rows_ = 0, share_ = 0;
};

// What an item asks for while it works on a block of keys: the next block; and, with its last
// blocks, the rows of its output, and the queries, and the first block of keys, of the next item. P
// multiplies; ForwardFewRows asks by itself.
template <class P>
struct ForwardAhead {
  ForwardAhead(const Problem&, const ForwardResult&, const ForwardItem&, int64_t) {}
  void begin_block(int64_t, int64_t) {}
  void ask() {}
};

template <class E, class K>
class ForwardAhead<ForwardTiles<E, K>> {
  using T = Compute<E>;
  // How often ask() is called for a tile and a block of keys.
  static constexpr int64_t kTimes = 3;
  // With how many blocks the end of the item is asked for: no more than a second-level cache of 512
  // KiB holds.
  static constexpr int64_t kLastBlocks = 4;

 public:
  // step: the keys of a block.
  ForwardAhead(const Problem& p, const ForwardResult& result, const ForwardItem& item, int64_t step)
      : p_(p), result_(result), item_(item), step_(step) {
    times_ = (item.row_end - item.row_begin + kTileRows<T> - 1) / kTileRows<T> * kTimes;
  }

  // The item begins a block of keys, after which [key, end) are left.
  void begin_block(int64_t key, int64_t end) {
    // An item of one tile is done before what it asks for comes.
    if (times_ <= kTimes) return;
    block_.clear();
    add_keys(item_, key, end, block_);
    block_.spread(times_);
    const int64_t blocks = 1 + std::max<int64_t>(0, end - key + step_ - 1) / step_;
    if (blocks > kLastBlocks || added_end_) return;
    added_end_ = true;
    add_end();
    end_.spread(blocks * times_);
  }

  // Asks for the next few rows.
  void ask() {
    block_.ask();
    end_.ask();
  }

 private:
  void add_end() {
    if (!item_.partial_output) add_rows(result_.output, item_, p_.head_dim_v);
    const ForwardItem* next = item_.next;
    if (!next) return;
    add_rows(p_.query, *next, p_.head_dim);
    if (next->plane == item_.plane) return;
    const int64_t hidden = key_begin(p_, next->row_begin / p_.group()) - next->key_begin;
    add_keys(*next, next->key_begin + std::max<int64_t>(0, hidden) / step_ * step_, next->key_end,
             end_);
  }

  // The rows of an item, of one head after the other.
  template <class Tensor>
  void add_rows(const Tensor& tensor, const ForwardItem& item, int64_t dim) {
    const auto rows = rows_of<E>(p_, tensor, item.plane);
    const int64_t count = item.row_end - item.row_begin;
    for (int64_t head = 0; rows.data && head < std::min(rows.group, count); ++head)
      end_.add(rows[item.row_begin + head], rows.row, rows.col, dim,
               (count - head + rows.group - 1) / rows.group);
  }

  // The first block of keys [key, end), and their values; of pages, what lies in the first one.
  void add_keys(const ForwardItem& item, int64_t key, int64_t end, RowsAhead& to) const {
    if (key >= end) return;
    const auto add = [&](const KeyRows<K>& rows, int64_t dim) {
      const int64_t last = std::min({key + step_, end, rows.piece_end(key)});
      to.add(rows.at(key), rows.row(), rows.col(), dim, last - key);
    };
    add(key_rows<K>(p_, item.plane), p_.head_dim);
    add(value_rows<K>(p_, item.plane), p_.head_dim_v);
  }

  const Problem& p_;
  const ForwardResult& result_;
  const ForwardItem& item_;
  int64_t step_, times_;
  RowsAhead block_, end_;
  bool added_end_ = false;
};

}  // namespace qkv::QKV_ISA
