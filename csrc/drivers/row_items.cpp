#include "row_items.h"

#include <algorithm>

#include "attention_jvp.h"
#include "mask_maps.h"
#include "pass.h"

namespace qkv {
namespace {

// One stretch; an item is some rows of one plane.
class RowTask {
 public:
  // `item`: the problem of any batch item of the stretch.
  RowTask(const Problem& call, const Kernels& kernels, const RowKernel& kernel,
          const Stretch& stretch, const Problem& item)
      : p_(call),
        kernel_(kernel),
        stretch_(stretch),
        tile_rows_(kernels.tile_rows),
        keys_(item.seqlen_k),
        planes_(item, stretch.count, 1) {}

  double flops() const { return double(planes_.count) * planes_.flops; }
  void plan(const Team& team) {
    item_rows_ = rows_of_item(planes_.rows, tile_rows_, team.pieces(planes_.flops));
    row_items_ = ceil_div(planes_.rows, item_rows_);
  }
  size_t workspace_bytes() const {
    return row_items_ ? kernel_(*ItemProblem(p_, stretch_.first), item(0), nullptr) : 0;
  }
  void take_memory(Arena&) const {}

  Items items() const {
    if (row_items_ == 0) return {};
    return {planes_.count * row_items_, planes_.flops / double(row_items_)};
  }
  void run(int64_t index, void* workspace) const {
    const ForwardItem rows = item(index);
    kernel_(*ItemProblem(p_, rows.plane.batch), rows, workspace);
  }
  Items last_items() const { return {}; }
  void finish(int64_t) const {}

 private:
  ForwardItem item(int64_t index) const {
    const int64_t plane = index / row_items_, row = index % row_items_ * item_rows_;
    return {stretch_.plane(p_, plane), row, std::min(planes_.rows, row + item_rows_), 0, keys_};
  }

  const Problem& p_;  // of the call
  const RowKernel& kernel_;
  const Stretch stretch_;
  int64_t tile_rows_, keys_;  // the keys of a plane
  Planes planes_;
  int64_t item_rows_ = 0, row_items_ = 0;  // the rows of an item, and how many items a plane has
};

}  // namespace

void for_each_row_item(const Problem& p, const Kernels& kernels, const RowKernel& kernel) {
  const std::vector<Stretch> stretches = stretches_of(p);
  Pass<RowTask> pass(stretches.size(), p.num_threads);
  for (const Stretch& stretch : stretches)
    pass.add(p, kernels, kernel, stretch, *ItemProblem(p, stretch.first));
  pass.run();
}

void attention_hard(const Problem& problem, const HardResult& result) {
  const Kernels& kernels = kernels_for(problem);
  const auto run = [&](const Problem& p, const ForwardItem& rows, void* workspace) {
    return kernels.hard(p, result, rows, workspace);
  };
  for_each_row_item(*MappedProblem(problem), kernels, run);
}

void attention_jvp(const Problem& problem, const JvpArgs& args, const JvpResult& result) {
  const Kernels& kernels = jvp_kernels(problem);
  const auto run = [&](const Problem& p, const ForwardItem& rows, void* workspace) {
    return kernels.jvp(p, args, result, rows, workspace);
  };
  for_each_row_item(*MappedProblem(problem), kernels, run);
}

}  // namespace qkv
