#include <algorithm>
#include <vector>

#include "attention.h"
#include "backward_task.h"
#include "common/workspace.h"
#include "pass.h"
#include "plan.h"
#include "threads/parallel.h"

namespace qkv {
namespace {

void add(const Problem& p, const BackwardArgs& args, Pass<BackwardTask>& pass) {
  if (p.batch() > 0 && p.heads > 0) pass.add(p, args);
}

// Whether the jobs add to the same elements of GradMask::each.
bool share_sums(const std::vector<BackwardJob>& jobs) {
  const auto shares = [](const BackwardJob& a, const BackwardJob& b) {
    for (int m = 0; m < kMasks; ++m) {
      const void* const sums = a.args.grad_masks[m].each.data;
      if (a.problem.heads > 0 && sums && sums == b.args.grad_masks[m].each.data) return true;
    }
    return false;
  };
  return std::adjacent_find(jobs.begin(), jobs.end(), shares) != jobs.end();
}

// Jobs that add to the same sums, in their order: an item is one class of all jobs, job after job.
// Returns false, and has done nothing, where a job alone has work for more threads than there are
// classes.
bool run_in_turn(const std::vector<BackwardJob>& jobs) {
  const int wanted = jobs.front().problem.num_threads;
  std::vector<BackwardTask> tasks;
  tasks.reserve(jobs.size());
  double flops = 0;
  for (const BackwardJob& job : jobs) {
    const BackwardTask& task = tasks.emplace_back(job.problem, job.args);
    if (task.has_groups() || task.classes() < usable_threads(wanted, task.flops())) return false;
    flops += task.flops();
  }
  const int64_t classes = tasks.front().classes();
  Threads threads{usable_threads(wanted, flops), 1};
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
  return true;
}

}  // namespace

void attention_backward(const Problem& problem, const BackwardArgs& args) {
  Pass<BackwardTask> pass(1, problem.num_threads);
  add(problem, args, pass);
  pass.run();
}

void attention_backward(const std::vector<BackwardJob>& jobs) {
  if (jobs.empty()) return;
  if (share_sums(jobs)) {
    if (!run_in_turn(jobs))
      for (const BackwardJob& job : jobs) attention_backward(job.problem, job.args);
    return;
  }
  Pass<BackwardTask> pass(jobs.size(), jobs.front().problem.num_threads);
  for (const BackwardJob& job : jobs) add(job.problem, job.args, pass);
  pass.run();
}

}  // namespace qkv
