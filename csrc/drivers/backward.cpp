#include <algorithm>
#include <optional>
#include <vector>

#include "attention.h"
#include "backward_task.h"
#include "common/row_sums.h"
#include "common/workspace.h"
#include "mask_maps.h"
#include "pass.h"
#include "plan.h"
#include "threads/parallel.h"

namespace qkv {
namespace {

// Every call looks through its log-sum-exps here, so no item's Problem is copied for it.
template <class T>
bool sums_any_row(const Problem& p, const BackwardArgs& a) {
  for (int64_t b = 0; b < p.batch(); ++b) {
    const int64_t begin = p.spans ? p.spans[b].query_begin : 0;
    const int64_t rows = p.spans ? p.spans[b].seqlen_q : p.seqlen_q;
    for (int64_t h = 0; h < p.heads; ++h) {
      const T* const lse = plane<T>(p, a.lse, b, h) + begin * a.lse.strides.row;
      bool any = false;  // without a branch for each row: nearly always none wants them
      for (int64_t i = 0; i < rows; ++i) any |= sums_row(p, a, lse[i * a.lse.strides.row]);
      if (any) return true;
    }
  }
  return false;
}

// Makes BackwardArgs::row_sums (common/row_sums.h), in parallel and in `memory`, if any row of the
// problem wants them.
void add_up_rows(const Problem& p, BackwardArgs& args, std::optional<Buffer>& memory) {
  const DType type = compute_type(p.dtype);
  if (!(type == DType::f64 ? sums_any_row<double>(p, args) : sums_any_row<float>(p, args))) return;
  Output sums;
  memory.emplace(size_t(lay_out_row_sums(p, sums.strides) * size_of(type)));
  sums.data = memory->data();
  const Kernels& kernels = kernels_for(p, args);
  const auto run = [&](const Problem& item, const ForwardItem& rows, void* workspace) {
    return kernels.row_sums(item, args, sums, rows, workspace);
  };
  for_each_row_item(p, kernels, run);
  args.row_sums = {sums.data, sums.strides};
}

void run_together(const Problem& p, const BackwardArgs& args,
                  const std::vector<Stretch>& stretches) {
  Pass<BackwardTask> pass(stretches.size(), p.num_threads);
  for (const Stretch& stretch : stretches)
    pass.add(p, args, stretch, *ItemProblem(p, stretch.first));
  pass.run();
  for (const BackwardTask& task : pass.tasks()) task.add_tables();
}

// Batch items of different sizes that add to the same sums, in their order: an item of work is one
// class of all of them, one after the other. Where there are fewer classes than one of them alone
// could use threads, or where their classes differ, since their sums of tables do (table_sums.h),
// each is a pass of its own.
void run_in_turn(const Problem& p, const BackwardArgs& args,
                 const std::vector<Stretch>& stretches) {
  std::vector<BackwardTask> tasks;
  tasks.reserve(stretches.size());
  double flops = 0;
  bool as_one = true;
  for (const Stretch& stretch : stretches) {
    const BackwardTask& task = tasks.emplace_back(p, args, stretch, *ItemProblem(p, stretch.first));
    as_one &= task.classes() == tasks.front().classes() &&
              task.classes() >= usable_threads(p.num_threads, task.flops());
    flops += task.flops();
  }
  if (!as_one) {
    for (const Stretch& stretch : stretches) run_together(p, args, {stretch});
    return;
  }
  const int64_t classes = tasks.front().classes();
  Threads threads{usable_threads(p.num_threads, flops), 1};
  threads.working = int(std::min<int64_t>(threads.team, classes));
  size_t bytes = 0;
  for (BackwardTask& task : tasks) {
    task.plan_by_class();
    bytes = std::max(bytes, task.workspace_bytes());
  }
  const Buffer workspaces(bytes * size_t(threads.working));
  parallel_phases(threads, 1,
                  {{[&](int64_t) { return Items{classes, flops / double(classes)}; },
                    [&](const Item& item) {
                      char* const own = static_cast<char*>(workspaces.data()) + item.thread * bytes;
                      for (const BackwardTask& task : tasks) task.run_class(item.index, own);
                    }}});
  for (const BackwardTask& task : tasks) task.add_tables();
}

}  // namespace

void attention_backward(const Problem& p, const BackwardArgs& args) {
  const bool in_turn = Sharing::between_items(p, args);
  const std::vector<Stretch> stretches = stretches_of(p, in_turn, /*without_queries=*/true);
  clear_grad_tables(p, args);
  if (stretches.empty()) return;
  const MappedProblem mapped(p);
  BackwardArgs summed = args;
  std::optional<Buffer> memory;
  add_up_rows(*mapped, summed, memory);
  (in_turn && stretches.size() > 1 ? run_in_turn : run_together)(*mapped, summed, stretches);
}

}  // namespace qkv
