// What the drivers have in common when they split problems into work items.
//
// A plane is a batch item and a key/value head, with the rows of all query heads
// that share it (dispatch/kernel_table.h). How its keys are split, and so every
// result, follows from the shape of one plane alone. Which planes and rows make
// an item changes no result: that follows the number of threads and whatever
// else is computed in the same call.
#pragma once

#include <algorithm>
#include <cmath>

#include "attention.h"
#include "common/visible.h"
#include "threads/parallel.h"

namespace qkv {

struct Planes {
  int64_t count;
  int64_t rows;  // of each, G * L
  double flops;  // of each, about

  // products: of rows by keys by D, and as many by Dv.
  Planes(const Problem& p, int products)
      : count(p.batch() * p.kv_heads),
        rows(p.group() * p.seqlen_q),
        flops(2.0 * products * rows * visible_keys(p) * (p.head_dim + p.head_dim_v)) {}
};

// Items a thread should have, so that the last one is a small part of the whole.
constexpr int kItemsPerThread = 6;

// All the work of a call, and how many share it.
struct Team {
  int threads;
  double flops;

  // How many pieces to cut a part of the work into. (Exact for equal parts: these
  // are whole numbers below 2^53.)
  int64_t pieces(double part, int items_per_thread = kItemsPerThread) const {
    return part > 0 ? int64_t(std::ceil(items_per_thread * threads * part / flops)) : 1;
  }
};

// Rows of one item: enough to use a block of keys several times while it is in
// the second-level cache, fewer where that leaves threads idle.
constexpr int64_t kItemRows = 128;

// For a plane that is to be cut into so many pieces.
inline int64_t rows_of_item(int64_t rows, int64_t row_block, int64_t pieces) {
  const int64_t wanted = std::min(kItemRows, ceil_div(rows, pieces));
  return std::max<int64_t>(1, ceil_div(wanted, row_block)) * row_block;
}

}  // namespace qkv
