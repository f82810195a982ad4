// Fetching into the second-level cache what the forward pass will read or write soon.
//
// The hardware looks ahead along one run of memory. Each item begins four new ones, of queries,
// keys, values and output, each of a few KiB, and waits for each line of them; and micro-kernels
// read along some 14 rows at once, which no look-ahead of the hardware foresees.
#pragma once

#include "kernels/passes/forward_few_rows.h"
#include "kernels/passes/forward_tiles.h"

namespace qkv::QKV_ISA {

// What the products of an item ask for while it works on a block of keys: soon, the next block; and
// later, with its last blocks, the rows of its output, and the queries, and the first block of
// keys, of the next item. P multiplies; ForwardFewRows asks by itself.
template <class P>
struct ForwardAhead {
  ForwardAhead(const Problem&, const ForwardResult&, const ForwardItem&, int64_t, P&) {}
  void begin_block(int64_t, int64_t) {}
};

template <class E, class K>
class ForwardAhead<ForwardTiles<E, K>> {
  using T = Compute<E>;
  // With how many blocks the end of the item is asked for: no more than a second-level cache of 512
  // KiB holds.
  static constexpr int64_t kLastBlocks = 4;
  // Keys and values of no more bytes are taken to be in a cache (asks_ahead): they have most often
  // just been written.
  static constexpr double kNear = 1 << 20;

 public:
  // step: the keys of a block.
  ForwardAhead(const Problem& p, const ForwardResult& result, const ForwardItem& item, int64_t step,
               ForwardTiles<E, K>& products)
      : p_(p), result_(result), item_(item), step_(step) {
    const int64_t rows = item.row_end - item.row_begin;
    asks_ = asks_ahead<T, K>(p, rows, kNear);
    if (!asks_) return;
    times_ = (rows + kTileRows<T> - 1) / kTileRows<T> * products.times_of_asking(p, step);
    products.set_ahead(&ahead_);
  }

  // The item begins a block of keys, after which [key, end) are left.
  void begin_block(int64_t key, int64_t end) {
    if (!asks_) return;
    ahead_.soon.clear();
    add_block(item_, key, end, ahead_.soon);
    ahead_.soon.spread(times_);
    const int64_t blocks = 1 + std::max<int64_t>(0, end - key + step_ - 1) / step_;
    if (blocks > kLastBlocks || added_end_) return;
    added_end_ = true;
    add_end();
    ahead_.later.spread(blocks * times_);
  }

 private:
  void add_end() {
    const auto add = [&](const auto& tensor, const ForwardItem& item, int64_t dim) {
      add_rows(rows_of<E>(p_, tensor, item.plane), item.row_begin, item.row_end, dim, ahead_.later);
    };
    if (!item_.partial_output) add(result_.output, item_, p_.head_dim_v);
    const ForwardItem* next = item_.next;
    if (!next) return;
    add(p_.query, *next, p_.head_dim);
    if (next->plane == item_.plane) return;
    const int64_t hidden = key_begin(p_, next->row_begin / p_.group()) - next->key_begin;
    add_block(*next, next->key_begin + std::max<int64_t>(0, hidden) / step_ * step_, next->key_end,
              ahead_.later);
  }

  // The first block of keys [key, end), and their values.
  void add_block(const ForwardItem& item, int64_t key, int64_t end, RowsAhead& to) const {
    if (key >= end) return;
    end = std::min(end, key + step_);
    add_keys(key_rows<K>(p_, item.plane), key, end, to);
    add_keys(value_rows<K>(p_, item.plane), key, end, to);
  }

  const Problem& p_;
  const ForwardResult& result_;
  const ForwardItem& item_;
  int64_t step_, times_ = 0;
  Ahead ahead_;
  bool asks_, added_end_ = false;
};

}  // namespace qkv::QKV_ISA
