// The backward passes of all jobs of a call, in one parallel region of up to two phases.
#include <algorithm>
#include <vector>

#include "attention.h"
#include "backward_task.h"
#include "common/workspace.h"
#include "plan.h"
#include "threads/parallel.h"

namespace qkv {
namespace {

class BackwardPass {
 public:
  BackwardPass(size_t jobs, int num_threads) : threads_{num_threads, 1} { tasks_.reserve(jobs); }

  void add(const Problem& p, const BackwardArgs& args) {
    if (p.batch() > 0 && p.heads > 0) tasks_.emplace_back(p, args);
  }

  void run() {
    plan();
    const Buffer buffer(lay_out(nullptr));
    lay_out(buffer.data());
    parallel_phases(
        threads_, int64_t(tasks_.size()),
        {{[this](int64_t job) { return tasks_[job].items(); },
          [this](const Item& item) { tasks_[item.job].run(item.index, workspace(item.thread)); },
          true},
         {[this](int64_t job) { return tasks_[job].mask_items(); },
          [this](const Item& item) { tasks_[item.job].finish_mask(item.index); }}});
  }

 private:
  void plan() {
    Team team{1, 0};
    for (const BackwardTask& task : tasks_) team.flops += task.flops();
    team.threads = threads_.team = usable_threads(threads_.team, team.flops);
    int64_t items = 0;
    for (BackwardTask& task : tasks_) {
      task.plan(team);
      items += task.items().count;
    }
    threads_.working = int(std::clamp<int64_t>(items, 1, team.threads));
  }

  // Divides `memory` among the tasks and the threads; returns how many bytes that takes.
  size_t lay_out(void* memory) {
    Arena arena(memory);
    workspace_bytes_ = 0;
    for (BackwardTask& task : tasks_) {
      workspace_bytes_ = std::max(workspace_bytes_, task.workspace_bytes());
      task.take_memory(arena);
    }
    workspaces_ = arena.take<char>(int64_t(workspace_bytes_) * threads_.working);
    return arena.used();
  }

  void* workspace(int thread) const { return workspaces_ + size_t(thread) * workspace_bytes_; }

  Threads threads_;
  std::vector<BackwardTask> tasks_;
  size_t workspace_bytes_ = 0;
  char* workspaces_ = nullptr;
};

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
  BackwardPass pass(1, problem.num_threads);
  pass.add(problem, args);
  pass.run();
}

void attention_backward(const std::vector<BackwardJob>& jobs) {
  if (jobs.empty()) return;
  if (share_sums(jobs)) {
    if (!run_in_turn(jobs))
      for (const BackwardJob& job : jobs) attention_backward(job.problem, job.args);
    return;
  }
  BackwardPass pass(jobs.size(), jobs.front().problem.num_threads);
  for (const BackwardJob& job : jobs) pass.add(job.problem, job.args);
  pass.run();
}

}  // namespace qkv
