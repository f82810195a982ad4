#include "row_items.h"

#include <algorithm>

#include "common/workspace.h"
#include "plan.h"
#include "threads/parallel.h"

namespace qkv {
namespace {

// How the planes of one stretch are cut into items.
struct Cut {
  const Problem& p;  // of the call
  Stretch stretch;
  int64_t keys;  // of a plane
  Planes planes;
  int64_t item_rows = 0, row_items = 0;  // the rows of an item, and how many items a plane has

  Cut(const Problem& call, const Stretch& stretch)
      : Cut(call, stretch, *ItemProblem(call, stretch.first)) {}
  Cut(const Problem& call, const Stretch& stretch, const Problem& item)
      : p(call), stretch(stretch), keys(item.seqlen_k), planes(item, stretch.count, 1) {
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
  ForwardItem item(int64_t index) const {
    const int64_t plane = index / row_items, row = index % row_items * item_rows;
    return {stretch.plane(p, plane), row, std::min(planes.rows, row + item_rows), 0, keys};
  }
};

}  // namespace

void for_each_row_item(const Problem& p, const RowPass& pass) {
  std::vector<Cut> cuts;
  Team team{1, 0};
  for (const Stretch& stretch : stretches_of(p))
    team.flops += cuts.emplace_back(p, stretch).flops();
  team.threads = usable_threads(p.num_threads, team.flops);
  int64_t items = 0;
  size_t bytes = 0;
  for (Cut& cut : cuts) {
    cut.cut_rows(team, pass.kernels);
    if (cut.items().count == 0) continue;
    items += cut.items().count;
    bytes = std::max(bytes, pass.workspace(*ItemProblem(p, cut.stretch.first),
                                           std::min(cut.item_rows, cut.planes.rows)));
  }
  if (items == 0) return;
  const Threads threads{team.threads, int(std::min<int64_t>(team.threads, items))};
  const Buffer workspaces(bytes * size_t(threads.working));
  const auto run = [&](const Item& item) {
    const ForwardItem rows = cuts[item.job].item(item.index);
    pass.run(*ItemProblem(p, rows.plane.batch), rows,
             static_cast<char*>(workspaces.data()) + size_t(item.thread) * bytes);
  };
  parallel_phases(threads, int64_t(cuts.size()),
                  {{[&](int64_t job) { return cuts[job].items(); }, run}});
}

}  // namespace qkv
