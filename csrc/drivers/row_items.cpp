#include "row_items.h"

#include <algorithm>

#include "common/workspace.h"
#include "plan.h"
#include "threads/parallel.h"

namespace qkv {

void for_each_row_item(const Problem& p, const Kernels& kernels, const RowPass& pass) {
  const Planes planes(p, 1);
  if (planes.count == 0 || planes.rows == 0) return;
  const double flops = double(planes.count) * planes.flops;
  const Team team{usable_threads(p.num_threads, flops), flops};
  const int64_t item_rows = rows_of_item(planes.rows, kernels.tile_rows, team.pieces(planes.flops));
  const int64_t row_items = ceil_div(planes.rows, item_rows);
  const Items items{planes.count * row_items, planes.flops / double(row_items)};
  const Threads threads{team.threads, int(std::min<int64_t>(team.threads, items.count))};
  const size_t bytes = pass.workspace(std::min(item_rows, planes.rows));
  const Buffer workspaces(bytes * size_t(threads.working));

  const auto run = [&](const Item& item) {
    const int64_t plane = item.index / row_items, row = item.index % row_items * item_rows;
    pass.run({plane / p.kv_heads, plane % p.kv_heads, row, std::min(planes.rows, row + item_rows),
              0, p.seqlen_k, nullptr, nullptr},
             static_cast<char*>(workspaces.data()) + size_t(item.thread) * bytes);
  };
  parallel_phases(threads, 1, {{[&](int64_t) { return items; }, run}});
}

}  // namespace qkv
