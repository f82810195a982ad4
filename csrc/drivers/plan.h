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
#include "dispatch/kernel_table.h"
#include "stretch.h"
#include "threads/parallel.h"

namespace qkv {

// The planes of a stretch of batch items. All are of one size.
struct Planes {
  int64_t count;
  int64_t rows;  // of one plane: G * L
  double flops;  // about what one plane takes

  // Of `items` batch items, of which p is one. The flops counted are those of `products` matrix
  // products of rows x keys x D, and of as many of rows x keys x Dv.
  Planes(const Problem& p, int64_t items, int products)
      : count(items * p.kv_heads),
        rows(p.plane_rows()),
        flops(2.0 * products * rows * visible_keys(p) * (p.head_dim + p.head_dim_v)) {}
};

// Into how many items each thread's share of the work is cut. While the last item of a call runs,
// the other threads wait: with 6 items each, for a sixth of the time at most. More items than that
// would have fewer rows each, and a block of keys would serve fewer tiles.
constexpr int kItemsPerThread = 6;

// The threads of a call, and all the work that they share.
struct Team {
  int threads;
  double flops;

  // Into how many pieces to cut a piece of work that takes `share` of all flops, so that every
  // thread gets `items_per_thread` of them. Where all shares are equal the division is exact, since
  // flops are whole numbers below 2^53; so rounding never decides how many pieces there are.
  int64_t pieces(double share, int items_per_thread = kItemsPerThread) const {
    return share > 0 ? int64_t(std::ceil(items_per_thread * threads * share / flops)) : 1;
  }
};

// The most rows of one item: enough to use a block of keys several times while it is in the
// second-level cache. No result depends on it.
constexpr int64_t kItemRows = 128;

// How many of the `rows` of a plane an item gets if there are to be `pieces` items: whole tiles of
// `tile_rows` rows, and no more rows than kItemRows fill tiles. The items may be more than
// `pieces`.
inline int64_t rows_of_item(int64_t rows, int64_t tile_rows, int64_t pieces) {
  const int64_t wanted = std::min(kItemRows, ceil_div(rows, pieces));
  return std::max<int64_t>(1, ceil_div(wanted, tile_rows)) * tile_rows;
}

// How many rows, `most` or down to half of them, an item gets so that `threads` threads end at
// about the same time, if every one of `planes` planes is cut alike, all its tiles take equally
// long, and the items with what is left of each plane go last.
inline int64_t even_rows(int64_t most, int64_t rows, int64_t tile_rows, int64_t planes,
                         int64_t threads) {
  const int64_t tiles = ceil_div(rows, tile_rows);
  // The tiles of the thread that ends last, if an item has `each`.
  const auto time = [&](int64_t each) {
    const int64_t whole = planes * (tiles / each), rounds = ceil_div(whole, threads);
    const int64_t left = tiles % each;
    if (left == 0) return rounds * each;
    const int64_t filled = (rounds * threads - whole) * (each / left);
    return rounds * each + ceil_div(std::max<int64_t>(0, planes - filled), threads) * left;
  };
  const int64_t first = std::min(tiles, ceil_div(most, tile_rows));
  int64_t best = first;
  for (int64_t each = first - 1; each >= ceil_div(first, 2); --each)
    if (time(each) < time(best)) best = each;
  return best * tile_rows;
}

// Refers to a function that calls a kernel in whose pass every row stands for itself (forward.cpp),
// and returns how much workspace that needs. A small call takes 14 instructions less than with a
// std::function, which would own a copy of it.
class RowKernel {
 public:
  template <class F>
  RowKernel(const F& call)
      : call_(&call), run_([](const void* f, const Problem& p, const ForwardItem& rows, void* own) {
          return (*static_cast<const F*>(f))(p, rows, own);
        }) {}
  size_t operator()(const Problem& item, const ForwardItem& rows, void* workspace) const {
    return run_(call_, item, rows, workspace);
  }

 private:
  const void* call_;
  size_t (*run_)(const void*, const Problem&, const ForwardItem&, void*);
};

// Runs the kernel, one of `kernels`, on items that together have every row of every plane of the
// problem, in parallel. `result` is that of Kernels::forward; without, rows see all keys at once.
void for_each_row_item(const Problem& problem, const Kernels& kernels, const RowKernel& kernel,
                       const ForwardResult* result = nullptr);

}  // namespace qkv
