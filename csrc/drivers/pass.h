// A pass over all jobs of a call, in one parallel region of two phases.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "common/workspace.h"
#include "plan.h"
#include "threads/parallel.h"

namespace qkv {

// A Task is one job, cut into items: RowTask (forward.cpp), BackwardTask or RotationTask. flops()
// is about how many floating-point operations it takes. plan() decides how it is cut, when all the
// work of the call is known; take_memory() follows, and then two phases: run() does the items() of
// the first, in a workspace, and finish() the last_items().
template <class Task>
class Pass {
 public:
  Pass(size_t jobs, int num_threads) : threads_{num_threads, 1} { tasks_.reserve(jobs); }

  template <class... Args>
  void add(Args&&... args) {
    tasks_.emplace_back(std::forward<Args>(args)...);
  }

  const std::vector<Task>& tasks() const { return tasks_; }

  void run() {
    plan();
    const Buffer buffer(lay_out(nullptr));
    lay_out(buffer.data());
    parallel_phases(
        threads_, int64_t(tasks_.size()),
        {{[this](int64_t job) { return tasks_[job].items(); },
          [this](const Item& item) { tasks_[item.job].run(item.index, workspace(item.thread)); },
          true},
         {[this](int64_t job) { return tasks_[job].last_items(); },
          [this](const Item& item) { tasks_[item.job].finish(item.index); }}});
  }

 private:
  void plan() {
    Team team{1, 0};
    for (const Task& task : tasks_) team.flops += task.flops();
    team.threads = threads_.team = usable_threads(threads_.team, team.flops);
    int64_t items = 0;
    for (Task& task : tasks_) {
      task.plan(team);
      items += task.items().count;
      workspace_bytes_ = std::max(workspace_bytes_, task.workspace_bytes());
    }
    threads_.working = int(std::clamp<int64_t>(items, 1, team.threads));
  }

  // Divides `memory` among the tasks and the threads; returns how many bytes that takes.
  size_t lay_out(void* memory) {
    Arena arena(memory);
    for (Task& task : tasks_) task.take_memory(arena);
    workspaces_ = arena.take<char>(int64_t(workspace_bytes_) * threads_.working);
    return arena.used();
  }

  void* workspace(int thread) const { return workspaces_ + size_t(thread) * workspace_bytes_; }

  Threads threads_;
  std::vector<Task> tasks_;
  size_t workspace_bytes_ = 0;  // of a thread
  char* workspaces_ = nullptr;  // [threads, workspace_bytes_]
};

}  // namespace qkv
