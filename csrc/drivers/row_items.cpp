#include "row_items.h"

#include <algorithm>

#include "common/workspace.h"
#include "plan.h"
#include "threads/parallel.h"

namespace qkv {
namespace {

// How the planes of one problem are cut into items.
struct Cut {
  Planes planes;
  int64_t item_rows = 0, row_items = 0;  // the rows of an item, and how many items a plane has

  explicit Cut(const Problem& p) : planes(p, 1) {
    if (planes.rows == 0) planes.count = 0;
  }
  double flops() const { return double(planes.count) * planes.flops; }

  void cut_rows(const Team& team, const Kernels& kernels) {
    if (planes.count == 0) return;
    item_rows = rows_of_item(planes.rows, kernels.tile_rows, team.pieces(planes.flops));
    row_items = ceil_div(planes.rows, item_rows);
  }
  Items items() const {
    if (planes.count == 0) return {};
    return {planes.count * row_items, planes.flops / double(row_items)};
  }
  ForwardItem item(const Problem& p, int64_t index) const {
    const int64_t plane = index / row_items, row = index % row_items * item_rows;
    return {plane / p.kv_heads,
            plane % p.kv_heads,
            row,
            std::min(planes.rows, row + item_rows),
            0,
            p.seqlen_k,
            nullptr,
            nullptr};
  }
};

}  // namespace

void for_each_row_item(const std::vector<RowPass>& passes) {
  std::vector<Cut> cuts;
  Team team{1, 0};
  for (const RowPass& pass : passes) team.flops += cuts.emplace_back(pass.problem).flops();
  team.threads = usable_threads(passes.front().problem.num_threads, team.flops);
  int64_t items = 0;
  size_t bytes = 0;
  for (size_t n = 0; n < passes.size(); ++n) {
    cuts[n].cut_rows(team, passes[n].kernels);
    const int64_t count = cuts[n].items().count;
    if (count == 0) continue;
    items += count;
    bytes = std::max(bytes, passes[n].workspace(std::min(cuts[n].item_rows, cuts[n].planes.rows)));
  }
  if (items == 0) return;
  const Threads threads{team.threads, int(std::min<int64_t>(team.threads, items))};
  const Buffer workspaces(bytes * size_t(threads.working));
  const auto run = [&](const Item& item) {
    const RowPass& pass = passes[item.job];
    pass.run(cuts[item.job].item(pass.problem, item.index),
             static_cast<char*>(workspaces.data()) + size_t(item.thread) * bytes);
  };
  parallel_phases(threads, int64_t(passes.size()),
                  {{[&](int64_t job) { return cuts[job].items(); }, run}});
}

}  // namespace qkv
