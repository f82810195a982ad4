// Fetching into the second-level cache what the backward pass will read soon, as forward_ahead.h
// does for the forward pass.
#pragma once

#include "kernels/passes/backward_rows.h"

namespace qkv::QKV_ISA {

// What the products of a block of rows ask for: the next block of rows; or, of the last block, what
// the next plane begins with. Of the results nothing: two threads would take 4 % longer with 50 x
// 50 x 32 (Zen 5). S: see backward.h.
template <class S>
class BackwardAhead {
  using E = typename S::Element;
  using T = typename S::T;

  // The most bytes of keys and values of the next plane: an eighth of a second-level cache of 1
  // MiB, which holds those of this one as well, and the sums of their gradients.
  static constexpr int64_t kMostBytes = int64_t(128) << 10;
  // Most of what it reads was last touched by the forward pass: it asks unless all of it and the
  // results, some four times as many bytes, are in a second-level cache (asks_ahead).
  static constexpr double kNear = 128 << 10;

 public:
  BackwardAhead(const Problem& p, const BackwardArgs& a, const BackwardItem& item)
      : p_(p),
        a_(a),
        item_(item),
        asks_(asks_ahead<T, E>(p, item.row_end - item.row_begin, kNear)) {}

  // The products of these rows are next; the rows after them are [next, end).
  void begin_rows(const BackwardRows<S>& rows, int64_t next, int64_t end, S& s) {
    if (!asks_) return;
    rows_.soon.clear();
    if (next < end)
      add_rows_of(item_.plane, next, std::min(end, next + kGradRows));
    else if (item_.next)
      add_plane(*item_.next);
    const Range seen = keys_of_tiles(rows.tiles, rows.count);
    const int64_t keys = std::max<int64_t>(
        1, std::min(seen.end, item_.key_end) - std::max(seen.begin, item_.key_begin));
    // Each product but dQ asks once for kProductRows keys and two vectors of columns.
    constexpr int64_t kColumns = 2 * kLanes<T>;
    const int64_t columns = 2 * rows.count + (p_.head_dim + kColumns - 1) / kColumns +
                            (p_.head_dim_v + kColumns - 1) / kColumns;
    rows_.soon.spread((keys + kProductRows - 1) / kProductRows * columns);
    s.ahead = &rows_;
  }

 private:
  void add_rows_of(Plane plane, int64_t begin, int64_t end) {
    const auto add = [&](const auto& tensor, int64_t dim) {
      add_rows(rows_of<E>(p_, tensor, plane), begin, end, dim, rows_.soon);
    };
    add(p_.query, p_.head_dim);
    add(a_.grad_output, p_.head_dim_v);
    if (!a_.row_sums.data) add(a_.output, p_.head_dim_v);
  }
  void add_plane(Plane plane) {
    add_rows_of(plane, 0, std::min(kGradRows, p_.plane_rows()));
    const int64_t key_bytes = (p_.head_dim + p_.head_dim_v) * int64_t(sizeof(E));
    const int64_t most = kMostBytes / std::max<int64_t>(1, key_bytes);
    const int64_t end = std::min(item_.key_end, item_.key_begin + most);
    add_keys(key_rows<E>(p_, plane), item_.key_begin, end, rows_.soon);
    add_keys(value_rows<E>(p_, plane), item_.key_begin, end, rows_.soon);
  }

  const Problem& p_;
  const BackwardArgs& a_;
  const BackwardItem& item_;
  Ahead rows_;
  bool asks_;
};

}  // namespace qkv::QKV_ISA
