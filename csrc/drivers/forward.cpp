// Splits forward passes into work items.
#include <algorithm>
#include <vector>

#include "attention.h"
#include "common/workspace.h"
#include "dispatch/kernel_table.h"
#include "merge.h"
#include "plan.h"
#include "threads/parallel.h"

namespace qkv {
namespace {

// Keys of one item when the keys are split, for up to kSplitRows rows: a few hundred microseconds
// of reading from memory. A split leaves a row of output for each of its rows, so that more rows
// have larger splits: what waits to be merged is then at most a quarter of a byte for each element
// of the values, an eighth of their size in half precision.
constexpr int64_t kSplitKeys = 512;
constexpr int64_t kSplitRows = 32;
// Queries of a decoding step, at most: all heads that share keys read them together.
constexpr int64_t kFewQueries = 16;

// One problem and how it is split.
struct Task {
  const Problem& p;
  const ForwardResult& result;
  const Kernels& kernels;
  Planes planes;
  int64_t splits = 1, split_keys, first_split;  // how many, keys of each, and the end of the first
  int64_t item_rows = 0, row_items = 0;
  bool by_plane = false;  // an item is a whole plane, its splits one after the other
  // What the splits make of one plane: outputs, then log-sum-exps, [splits, rows].
  int64_t element, output_bytes = 0, parts_bytes = 0;
  char* parts = nullptr;  // [planes, parts_bytes], unless by_plane

  Task(const Problem& problem, const ForwardResult& to)
      : p(problem),
        result(to),
        kernels(active_kernels(p.dtype)),
        planes(p, 1),
        split_keys(kSplitKeys * ceil_div(planes.rows, kSplitRows)),
        first_split(p.seqlen_k),
        element(size_of(compute_type(p.dtype))) {
    // Few queries and many keys: split the keys that any query sees. The order of
    // summation follows from it, so it depends on the shape of one plane alone.
    const int64_t begin = key_begin(p, 0), end = key_end(p, p.seqlen_q - 1);
    const bool few = planes.rows <= 2 * kernels.row_block ||
                     (p.seqlen_q <= kFewQueries && planes.rows <= kItemRows);
    if (!few || end - begin <= split_keys) return;
    splits = ceil_div(end - begin, split_keys);
    first_split = begin + split_keys;
    output_bytes = splits * planes.rows * p.head_dim_v * element;
    parts_bytes = output_bytes + splits * planes.rows * element;
  }

  // Rows are independent of each other: they are grouped as suits the threads.
  void group_rows(const Team& team) {
    const int64_t pieces = team.pieces(planes.flops);
    item_rows = rows_of_item(planes.rows, kernels.row_block, ceil_div(pieces, splits));
    row_items = ceil_div(planes.rows, item_rows);
    // Partial results wait in memory, so as few as keep the threads busy.
    by_plane = splits > 1 && pieces == 1;
  }

  Items items() const {
    const int64_t each = by_plane ? 1 : row_items * splits;
    return {planes.count * each, planes.flops / double(each)};
  }
  Items rows_to_merge() const {
    return {splits > 1 && !by_plane ? planes.count * planes.rows : 0,
            double((p.head_dim_v + 1) * splits)};
  }

  // Rows [row, row + item_rows) of one plane against one split of the keys. The
  // first split takes the keys that no query sees, too: they cost nothing.
  void attend(int64_t plane, int64_t split, int64_t row, char* plane_parts, void* workspace) const {
    ForwardBlock block{plane / p.kv_heads,
                       plane % p.kv_heads,
                       row,
                       std::min(planes.rows, row + item_rows),
                       split == 0 ? 0 : first_split + (split - 1) * split_keys,
                       std::min(p.seqlen_k, first_split + split * split_keys),
                       nullptr,
                       nullptr};
    if (splits > 1) {
      const int64_t at = split * planes.rows + row;
      block.partial_output = plane_parts + at * p.head_dim_v * element;
      block.partial_lse = plane_parts + output_bytes + at * element;
    }
    kernels.forward(p, result, block, workspace);
  }

  void merge(int64_t plane, int64_t row, char* plane_parts) const {
    merge_row(p, result, plane / p.kv_heads, plane % p.kv_heads, row,
              {plane_parts, plane_parts + output_bytes, splits, planes.rows});
  }
};

class ForwardPass {
 public:
  ForwardPass(size_t jobs, int num_threads) : threads_{num_threads, 1} { tasks_.reserve(jobs); }

  void add(const Problem& p, const ForwardResult& result) {
    if (p.batch() == 0 || p.heads == 0 || p.seqlen_q == 0) return;
    tasks_.emplace_back(p, result);
  }

  void run() {
    plan();
    const Buffer buffer(lay_out(nullptr));
    lay_out(buffer.data());
    parallel_phases(threads_, int64_t(tasks_.size()),
                    {{[this](int64_t job) { return tasks_[job].items(); },
                      [this](const Item& item) {
                        const Task& task = tasks_[item.job];
                        task.by_plane ? run_plane(task, item) : run_block(task, item);
                      },
                      true},
                     {[this](int64_t job) { return tasks_[job].rows_to_merge(); },
                      [this](const Item& item) {
                        const Task& task = tasks_[item.job];
                        const int64_t plane = item.index / task.planes.rows;
                        task.merge(plane, item.index % task.planes.rows,
                                   task.parts + plane * task.parts_bytes);
                      }}});
  }

 private:
  void plan() {
    Team team{1, 0};
    for (const Task& task : tasks_) team.flops += double(task.planes.count) * task.planes.flops;
    team.threads = threads_.team = usable_threads(threads_.team, team.flops);
    int64_t items = 0;
    for (Task& task : tasks_) {
      task.group_rows(team);
      items += task.items().count;
    }
    threads_.working = int(std::clamp<int64_t>(items, 1, team.threads));
  }

  // Divides the memory of the call; returns its size.
  size_t lay_out(void* memory) {
    Arena arena(memory);
    size_t workspace = 0;
    int64_t parts = 0;
    for (Task& task : tasks_) {
      workspace = std::max(workspace, task.kernels.forward_workspace(
                                          task.p, std::min(task.item_rows, task.planes.rows)));
      if (task.by_plane)
        parts = std::max(parts, task.parts_bytes);
      else
        task.parts = arena.take<char>(task.planes.count * task.parts_bytes);
    }
    Arena each(nullptr);
    each.take<char>(int64_t(workspace));
    parts_of_thread_ = each.used();
    each.take<char>(parts);
    thread_bytes_ = each.used();
    threads_memory_ = arena.take<char>(int64_t(thread_bytes_) * threads_.working);
    return arena.used();
  }

  char* workspace(int thread) const { return threads_memory_ + size_t(thread) * thread_bytes_; }

  void run_block(const Task& task, const Item& item) const {
    const int64_t split = item.index / task.row_items % task.splits;
    const int64_t plane = item.index / (task.row_items * task.splits);
    // Causal: the last rows see the most keys, so they go first.
    const int64_t row = (task.row_items - 1 - item.index % task.row_items) * task.item_rows;
    task.attend(plane, split, row, task.parts + plane * task.parts_bytes, workspace(item.thread));
  }

  void run_plane(const Task& task, const Item& item) const {
    char* const memory = workspace(item.thread);
    char* const parts = memory + parts_of_thread_;
    for (int64_t split = 0; split < task.splits; ++split)
      for (int64_t row = 0; row < task.planes.rows; row += task.item_rows)
        task.attend(item.index, split, row, parts, memory);
    for (int64_t row = 0; row < task.planes.rows; ++row) task.merge(item.index, row, parts);
  }

  Threads threads_;
  std::vector<Task> tasks_;
  size_t parts_of_thread_ = 0, thread_bytes_ = 0;
  char* threads_memory_ = nullptr;
};

}  // namespace

void attention_forward(const Problem& problem, const ForwardResult& result) {
  ForwardPass pass(1, problem.num_threads);
  pass.add(problem, result);
  pass.run();
}

void attention_forward(const std::vector<ForwardJob>& jobs) {
  if (jobs.empty()) return;
  ForwardPass pass(jobs.size(), jobs.front().problem.num_threads);
  for (const ForwardJob& job : jobs) pass.add(job.problem, job.result);
  pass.run();
}

}  // namespace qkv
