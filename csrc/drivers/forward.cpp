// The forward passes of all jobs of a call, in one parallel region of two phases: the kernels, and
// the merging of parts where keys were split.
#include <algorithm>
#include <numeric>
#include <optional>
#include <vector>

#include "attention.h"
#include "common/workspace.h"
#include "dispatch/kernel_table.h"
#include "merge.h"
#include "plan.h"
#include "threads/parallel.h"

namespace qkv {
namespace {

// The keys of one split, where the keys are split, for planes of up to kSplitRows rows: a few
// hundred microseconds of reading from memory. A split leaves a row of output for each of its rows,
// so planes of more rows have proportionally larger splits: the parts that wait to be merged then
// take at most a quarter of a byte for each element of the values, which is an eighth of their size
// in half precision. The splits of a plane are equal but for the last one, as their sizes are
// multiples of kSplitUnit.
constexpr int64_t kSplitKeys = 512;
constexpr int64_t kSplitRows = 32;
constexpr int64_t kSplitUnit = 64;
// The most queries of a plane whose keys are split although its rows are more than two tiles: a
// decoding step has few queries, and all heads that share keys read them together.
constexpr int64_t kFewQueries = 16;
// Where the weights are wanted, a kernel keeps those of all rows that it is called with. They are
// no more bytes than this, if one tile has not more: they and the elements that they are added to
// fit into a second-level cache of 1 MiB.
constexpr int64_t kWeightsBytes = int64_t(512) << 10;

// One job, and how it is cut into items.
//
// An item is some rows of one plane against one split of its keys. Where keys are split, each split
// leaves a part of each row's output in memory, and a second phase merges them. If there are
// planes enough for all threads, an item is a whole plane instead (by_plane): it takes split after
// split and merges at the end, and its parts are in its thread's memory. Both give the same bits.
//
// Where the weights are wanted, keys are not split. If the weights of all heads are added up, an
// item is the same rows of all planes of a batch item, one plane after the other.
struct Task {
  const Problem& p;
  const ForwardResult& result;
  const Kernels& kernels;
  Planes planes;
  int64_t splits = 1;                    // of a plane
  int64_t split_keys;                    // the keys of a split
  int64_t first_split;                   // the end of the first split
  int64_t item_rows = 0, row_items = 0;  // the rows of an item, and how many such items a plane has
  int64_t call_rows = 0;                 // the rows that a kernel is called with
  int64_t item_planes = 1;               // the planes whose rows an item has
  bool by_plane = false;
  // Whether the dearest items of all planes go first, and not the planes one after the other.
  bool by_rows = false;
  // The parts of one plane: outputs [splits, rows, Dv], which take output_bytes, then log-sum-exps
  // [splits, rows]. `element` is the size of one number.
  int64_t element, output_bytes = 0, parts_bytes = 0;
  char* parts = nullptr;  // [planes, parts_bytes], unless by_plane

  Task(const Problem& problem, const ForwardResult& to)
      : p(problem),
        result(to),
        kernels(forward_kernels(p)),
        planes(p, 1),
        split_keys(kSplitKeys * ceil_div(planes.rows, kSplitRows)),
        first_split(p.seqlen_k),
        element(size_of(compute_type(p.dtype))) {
    // With few queries and many keys, the keys that any query sees are split. The order of
    // summation follows from the splits, so they follow from the shape of one plane alone.
    const int64_t begin = key_begin(p, 0), end = key_end(p, p.seqlen_q - 1);
    if (result.weights.data) {
      if (result.weights.strides.head == 0) item_planes = p.kv_heads;
      return;
    }
    const bool few = planes.rows <= 2 * kernels.tile_rows ||
                     (p.seqlen_q <= kFewQueries && planes.rows <= kItemRows);
    if (!few || end - begin <= split_keys) return;
    splits = ceil_div(end - begin, split_keys);
    split_keys = ceil_div(ceil_div(end - begin, splits), kSplitUnit) * kSplitUnit;
    first_split = begin + split_keys;
    output_bytes = splits * planes.rows * p.head_dim_v * element;
    parts_bytes = output_bytes + splits * planes.rows * element;
  }

  // Decides how many rows an item has. No row's result depends on the other rows of its item, so
  // this may follow the number of threads.
  void cut_rows(const Team& team) {
    const int64_t pieces = team.pieces(planes.flops * double(item_planes));
    item_rows = rows_of_item(planes.rows, kernels.tile_rows, ceil_div(pieces, splits));
    const bool alone = team.flops == planes.flops * double(planes.count);
    if (alone && !p.is_causal && item_planes == 1)
      item_rows =
          even_rows(item_rows, planes.rows, kernels.tile_rows, planes.count * splits, team.threads);
    call_rows = item_rows;
    if (result.weights.data) limit_kept_weights();
    row_items = ceil_div(planes.rows, item_rows);
    // With so many threads none gets two items of a plane in a row, whose keys it would have in its
    // cache: on two threads the order by rows takes 3 to 5 % longer (Zen 3, causal shapes of
    // python -m qkv.bench). On 64 the order by planes would leave a sixth of their time unused.
    const bool equal = !p.is_causal && planes.rows % item_rows == 0;
    by_rows = !equal && team.threads >= row_items;
    // Parts of several items wait in memory, so only where that is needed to keep threads busy.
    by_plane = splits > 1 && pieces == 1;
  }

  void limit_kept_weights() {
    const int64_t tile_bytes = kernels.tile_rows * std::max<int64_t>(1, p.seqlen_k) * element;
    const int64_t most_tiles = std::max<int64_t>(1, kWeightsBytes / tile_bytes);
    call_rows = item_rows = std::min(item_rows, most_tiles * kernels.tile_rows);
    // The heads of a group add to the same elements, and no two items may: an item has all rows of
    // its queries.
    if (result.weights.strides.head != 0) return;
    const int64_t whole_queries = std::lcm(kernels.tile_rows, p.group());
    item_rows = ceil_div(item_rows, whole_queries) * whole_queries;
  }

  // What item `index` is, unless by_plane: rows [begin, end) of item_planes planes from `plane` on,
  // against one split of the keys.
  struct Place {
    int64_t plane, split, begin, end;
  };
  Place place(int64_t index) const {
    const int64_t each = row_items * splits, all = planes.count / item_planes;
    const int64_t of_plane = by_rows ? index / all : index % each;
    // Under is_causal the last rows see the most keys, so they go first. Elsewhere the last item
    // may have the fewest rows.
    const int64_t nth = of_plane % row_items;
    const int64_t begin = (p.is_causal ? row_items - 1 - nth : nth) * item_rows;
    return {(by_rows ? index % all : index / each) * item_planes, of_plane / row_items, begin,
            std::min(planes.rows, begin + item_rows)};
  }
  // Whether an item is one call of a kernel.
  bool has_simple_items() const { return !by_plane && item_planes == 1 && call_rows == item_rows; }

  Items items() const {
    const int64_t each = by_plane ? 1 : row_items * splits;
    return {planes.count / item_planes * each, planes.flops * double(item_planes) / double(each)};
  }
  Items rows_to_merge() const {
    return {splits > 1 && !by_plane ? planes.count * planes.rows : 0,
            double((p.head_dim_v + 1) * splits)};
  }

  ForwardItem of_kernel(int64_t plane, int64_t split, int64_t row, int64_t end) const {
    return {plane / p.kv_heads,
            plane % p.kv_heads,
            row,
            std::min(end, row + call_rows),
            split == 0 ? 0 : first_split + (split - 1) * split_keys,
            std::min(p.seqlen_k, first_split + split * split_keys),
            nullptr,
            nullptr};
  }

  // Runs rows [row, end), call_rows at most, of one plane against one split of the keys. The first
  // split begins at key 0, and the kernels skip the keys before those that a query sees.
  void attend(int64_t plane, int64_t split, int64_t row, int64_t end, char* plane_parts,
              void* workspace, const ForwardItem* next = nullptr) const {
    ForwardItem item = of_kernel(plane, split, row, end);
    item.next = next;
    if (splits > 1) {
      const int64_t at = split * planes.rows + row;
      item.partial_output = plane_parts + at * p.head_dim_v * element;
      item.partial_lse = plane_parts + output_bytes + at * element;
    }
    kernels.forward(p, result, item, workspace);
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
                        task.by_plane ? run_plane(task, item) : run_rows(task, item);
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
      task.cut_rows(team);
      items += task.items().count;
    }
    threads_.working = int(std::clamp<int64_t>(items, 1, team.threads));
  }

  // Divides `memory` among the parts that wait and the threads; returns how many bytes that takes.
  // A thread has a workspace for the kernels, and behind it the parts of the plane that it works
  // on.
  size_t lay_out(void* memory) {
    Arena arena(memory);
    size_t workspace = 0;
    int64_t parts = 0;
    for (Task& task : tasks_) {
      workspace = std::max(workspace, task.kernels.forward_workspace(
                                          task.p, std::min(task.call_rows, task.planes.rows),
                                          task.result.weights.data));
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

  void run_rows(const Task& task, const Item& item) const {
    const Task::Place at = task.place(item.index);
    // Most often a thread goes on with the next item of the list.
    std::optional<ForwardItem> next;
    if (task.has_simple_items() && item.index + 1 < task.items().count) {
      const Task::Place to = task.place(item.index + 1);
      next = task.of_kernel(to.plane, to.split, to.begin, to.end);
    }
    for (int64_t plane = at.plane; plane < at.plane + task.item_planes; ++plane)
      for (int64_t row = at.begin; row < at.end; row += task.call_rows)
        task.attend(plane, at.split, row, at.end, task.parts + plane * task.parts_bytes,
                    workspace(item.thread), next ? &*next : nullptr);
  }

  void run_plane(const Task& task, const Item& item) const {
    char* const memory = workspace(item.thread);
    char* const parts = memory + parts_of_thread_;
    for (int64_t split = 0; split < task.splits; ++split)
      for (int64_t row = 0; row < task.planes.rows; row += task.item_rows)
        task.attend(item.index, split, row, task.planes.rows, parts, memory);
    for (int64_t row = 0; row < task.planes.rows; ++row) task.merge(item.index, row, parts);
  }

  Threads threads_;
  std::vector<Task> tasks_;
  size_t parts_of_thread_ = 0;      // the offset of the parts in a thread's memory
  size_t thread_bytes_ = 0;         // a thread's memory
  char* threads_memory_ = nullptr;  // [threads, thread_bytes_]
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
