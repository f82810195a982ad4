// What the drivers have in common when they split problems into work items.
//
// A plane is one batch item and one key/value head, with the rows of all query heads that share it
// (dispatch/kernel_table.h). Results depend on how the keys of a plane are split, so that follows
// from the shape of one plane alone. Results do not depend on which planes and rows make an item,
// so that may follow the number of threads and what else is computed in the same call.
#pragma once

#include <algorithm>
#include <cmath>

#include "attention.h"
#include "common/visible.h"
#include "threads/parallel.h"

namespace qkv {

// The planes of a problem, all of one size.
struct Planes {
  int64_t count;
  int64_t rows;  // of one plane: G * L
  double flops;  // of one plane, about

  // The flops counted are those of `products` matrix products of rows x keys x D, and of as many of
  // rows x keys x Dv.
  Planes(const Problem& p, int products)
      : count(p.batch() * p.kv_heads),
        rows(p.group() * p.seqlen_q),
        flops(2.0 * products * rows * visible_keys(p) * (p.head_dim + p.head_dim_v)) {}
};

// Into how many items each thread's share of the work is cut. While the last item of a call runs,
// the other threads wait: with 6 items each, for a sixth of the time at most.
constexpr int kItemsPerThread = 6;

// The threads of a call, and all the work that they share.
struct Team {
  int threads;
  double flops;

  // How many pieces to cut `part`, flops out of all, into. The division is exact where all parts
  // are equal, since flops are whole numbers below 2^53; so the last digit does not decide.
  int64_t pieces(double part, int items_per_thread = kItemsPerThread) const {
    return part > 0 ? int64_t(std::ceil(items_per_thread * threads * part / flops)) : 1;
  }
};

// The most rows of one item: enough to use a block of keys several times while it is in the
// second-level cache.
constexpr int64_t kItemRows = 128;

// How many of the `rows` of a plane an item gets if there are to be `pieces` items: a multiple of
// row_block, fewer than kItemRows where threads would be idle otherwise.
inline int64_t rows_of_item(int64_t rows, int64_t row_block, int64_t pieces) {
  const int64_t wanted = std::min(kItemRows, ceil_div(rows, pieces));
  return std::max<int64_t>(1, ceil_div(wanted, row_block)) * row_block;
}

}  // namespace qkv
