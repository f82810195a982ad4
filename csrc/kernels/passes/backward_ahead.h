// Fetching into the second-level cache what the backward pass will read or write soon, as
// forward_ahead.h does for the forward pass.
#pragma once

#include "kernels/passes/backward_rows.h"

namespace qkv::QKV_ISA {

// What the products of a block of rows ask for: the next block of rows, of the inputs and of the
// gradient; or, of the last block, what the next plane begins with. S: see backward.h.
template <class S>
class BackwardAhead {
  using E = typename S::Element;
  using T = typename S::T;

  // The most bytes of keys and values of the next plane, and of their gradients: a quarter of a
  // second-level cache of 1 MiB, which holds those of this one as well.
  static constexpr int64_t kMostBytes = int64_t(256) << 10;

 public:
  BackwardAhead(const Problem& p, const BackwardArgs& a, const BackwardItem& item)
      : p_(p), a_(a), item_(item), asks_(asks_ahead<T, E>(p, item.row_end - item.row_begin)) {}

  // The products of these rows are next; the rows after them are [next, end).
  void begin_rows(const BackwardRows<S>& rows, int64_t next, int64_t end, S& s) {
    if (!asks_) return;
    rows_.soon.clear();
    if (next < end)
      add_rows_of(item_.plane, next, std::min(end, next + kGradRows));
    else if (item_.next)
      add_plane(*item_.next);
    const Range seen = keys_of_tiles(rows.tiles, rows.count);
    const int64_t keys = std::min(seen.end, item_.key_end) - std::max(seen.begin, item_.key_begin);
    // Products by keys ask once for so many of them, two vectors of columns and each product but
    // dQ.
    constexpr int64_t kColumns = 2 * kLanes<T>;
    const int64_t columns = 2 * rows.count + (p_.head_dim + kColumns - 1) / kColumns +
                            (p_.head_dim_v + kColumns - 1) / kColumns;
    rows_.soon.spread(std::max<int64_t>(1, keys / kProductRows) * columns);
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
    add(a_.grad_query, p_.head_dim);
  }
  void add_plane(Plane plane) {
    add_rows_of(plane, 0, std::min(kGradRows, p_.plane_rows()));
    const int64_t key_bytes = 2 * (p_.head_dim + p_.head_dim_v) * int64_t(sizeof(E));
    const int64_t end = std::min(item_.key_end, item_.key_begin + kMostBytes / key_bytes);
    const auto add = [&](const KeyRows<E>& rows, const Output& grad) {
      add_keys(rows, item_.key_begin, end, rows_.soon);
      const Rows<E> to{key_plane<E>(p_, grad, plane), 1, 0, grad.strides.row, grad.strides.col};
      if (grad.data) add_rows(to, item_.key_begin, end, rows.dim(), rows_.soon);
    };
    add(key_rows<E>(p_, plane), a_.grad_key);
    add(value_rows<E>(p_, plane), a_.grad_value);
  }

  const Problem& p_;
  const BackwardArgs& a_;
  const BackwardItem& item_;
  Ahead rows_;
  bool asks_;
};

}  // namespace qkv::QKV_ISA
