#include <algorithm>
#include <vector>

#include "attention.h"
#include "backward_task.h"
#include "common/workspace.h"
#include "mask_maps.h"
#include "pass.h"
#include "plan.h"
#include "row_sums.h"
#include "threads/parallel.h"

namespace qkv {
namespace {

void run_together(const Problem& p, const BackwardArgs& args,
                  const std::vector<Stretch>& stretches) {
  Pass<BackwardTask> pass(stretches.size(), p.num_threads);
  for (const Stretch& stretch : stretches) pass.add(p, args, stretch);
  pass.run();
}

// Batch items of different sizes that add to the same sums, in their order: an item of work is one
// class of all of them, one after the other. Where there are fewer classes than one of them alone
// could use threads, each is a pass of its own.
void run_in_turn(const Problem& p, const BackwardArgs& args,
                 const std::vector<Stretch>& stretches) {
  std::vector<BackwardTask> tasks;
  tasks.reserve(stretches.size());
  double flops = 0;
  bool all_fill_threads = true;
  for (const Stretch& stretch : stretches) {
    const BackwardTask& task = tasks.emplace_back(p, args, stretch);
    all_fill_threads &= task.classes() >= usable_threads(p.num_threads, task.flops());
    flops += task.flops();
  }
  if (!all_fill_threads) {
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
}

}  // namespace

void attention_backward(const Problem& p, const BackwardArgs& args) {
  const bool in_turn = Sharing::between_items(p, args);
  const std::vector<Stretch> stretches = stretches_of(p, in_turn, /*without_queries=*/true);
  if (stretches.empty()) return;
  const MappedProblem mapped(p);
  const RowSums sums(*mapped, args);
  (in_turn && stretches.size() > 1 ? run_in_turn : run_together)(*mapped, sums.args(), stretches);
}

}  // namespace qkv
