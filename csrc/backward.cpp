// Splits backward passes into work items.
#include <algorithm>
#include <vector>

#include "attention.h"
#include "grad_rows.h"
#include "isa/implementation.h"
#include "parallel.h"
#include "plan.h"
#include "sharing.h"
#include "strides.h"
#include "workspace.h"

namespace qkv {
namespace {

// The keys of one plane are split, so that one head alone can use every core.
// Each split sums its own grad_query; the sums are added in order of keys.
constexpr int64_t kSplitKeys = 256;  // about, at least: below, adding up the parts shows
constexpr int64_t kMaxSplits = 8;
// Parts cost memory; past this, half as many.
constexpr int64_t kMaxPartBytes = int64_t(32) << 20;
// Planes that share an element of grad_mask or weights run one after the other,
// so that few of them run at a time. Then the splits are finer, to have so many
// items at a time, but no finer than this, nor so fine that the parts would take
// more memory than grad_mask.
constexpr int64_t kSharedItems = 16;
constexpr int64_t kFineSplitKeys = 64;

// Whether the keys have to be looked at.
bool wants_keys(const BackwardArgs& a) {
  return a.grad_query.data || a.grad_key.data || a.grad_value.data || a.grad_mask.data ||
         a.grad_mask_keys.data || a.grad_alibi_slopes.data || a.weights.data;
}

// One problem and how it is split. It takes as many rounds as planes share
// something; in each, there is one plane of each class.
struct Task {
  const Problem& p;
  const BackwardArgs& args;
  const Kernels& kernels;
  Sharing sharing;
  Planes planes;  // of one round
  int64_t element;
  int64_t splits = 0, split_keys = 0;
  bool by_plane = false;     // an item is a whole plane, splits one after the other: no parts
  int64_t parts = 0;         // of the grad_query of each plane
  char* partials = nullptr;  // [classes, parts, G * L, D]
  double* slopes = nullptr;  // [classes, splits, G]

  Task(const Problem& problem, const BackwardArgs& to)
      : p(problem),
        args(to),
        kernels(active_implementation().kernels(p.dtype)),
        sharing(p, args),
        planes(p, 5),
        element(p.dtype == DType::f32 ? sizeof(float) : sizeof(double)) {
    planes.count = sharing.classes();
    if (!wants_keys(args)) return;
    const int64_t part_bytes = planes.rows * p.head_dim * element;
    splits = std::clamp<int64_t>(p.seqlen_k / kSplitKeys, 1, kMaxSplits);
    if ((splits - 1) * part_bytes > kMaxPartBytes) splits = std::min(splits, kMaxSplits / 2);
    if (sharing.positions() > 1) {
      const int64_t finest = std::max(kFineSplitKeys, p.group() * p.head_dim);
      const int64_t wanted = std::min(ceil_div(kSharedItems, planes.count), p.seqlen_k / finest);
      splits = std::max(splits, wanted);
    }
    split_keys = std::max<int64_t>(1, ceil_div(p.seqlen_k, splits));
    splits = std::max<int64_t>(1, ceil_div(p.seqlen_k, split_keys));
  }

  void group_planes(const Team& team) {
    const bool alone = double(planes.count) * planes.flops == team.flops;
    // Whole planes when they fill the threads evenly, or nearly so.
    by_plane =
        splits > 0 && (team.threads == 1 || splits == 1 || team.pieces(planes.flops, 4) == 1 ||
                       (alone && planes.count % team.threads == 0));
    parts = by_plane || !args.grad_query.data ? 0 : std::max<int64_t>(splits - 1, 0);
  }

  Items items() const {
    if (splits == 0) return {};
    const int64_t each = by_plane ? 1 : splits;
    return {planes.count * each, planes.flops / double(each)};
  }
  // Blocks of rows whose grad_query is to be put together.
  int64_t row_blocks() const { return ceil_div(planes.rows, kGradRows); }
  Items query_items() const {
    if (by_plane || !args.grad_query.data) return {};
    return {planes.count * row_blocks(), double(kGradRows * p.head_dim * parts)};
  }
  Items head_items() const {
    if (by_plane || !(args.grad_alibi_slopes.data || wants_grad_rows(args))) return {};
    return {planes.count, double(planes.rows * p.head_dim_v)};
  }

  int64_t part_bytes() const { return planes.rows * p.head_dim * element; }

  // `its_class` says where the parts are.
  void run_split(int64_t plane, int64_t its_class, int64_t split, void* workspace) const {
    BackwardBlock block{plane / p.kv_heads,
                        plane % p.kv_heads,
                        split * split_keys,
                        std::min(p.seqlen_k, (split + 1) * split_keys),
                        nullptr,
                        split > 0 && parts == 0};
    if (parts && split > 0)
      block.partial_grad_query = partials + (its_class * parts + split - 1) * part_bytes();
    if (args.grad_alibi_slopes.data)
      block.grad_slopes = slopes + (its_class * splits + split) * p.group();
    kernels.backward(p, args, block, workspace);
  }

  void finish_query(int64_t plane, int64_t its_class, int64_t row_begin, int64_t row_end) const {
    if (!args.grad_query.data) return;
    kernels.finish_grad_query(p, args,
                              {plane / p.kv_heads, plane % p.kv_heads, row_begin, row_end,
                               split_keys, parts, partials + its_class * parts * part_bytes()});
  }

  // What there is one of for each head, or each of its queries.
  void finish_heads(int64_t plane, int64_t its_class) const {
    for (int64_t g = 0; g < p.group(); ++g) {
      const int64_t batch = plane / p.kv_heads, head = plane % p.kv_heads * p.group() + g;
      if (args.grad_alibi_slopes.data) {
        double sum = 0;
        for (int64_t s = 0; s < splits; ++s)
          sum += slopes[(its_class * splits + s) * p.group() + g];
        *qkv::plane<double>(p, args.grad_alibi_slopes, batch, head) = sum;
      }
      if (wants_grad_rows(args)) grad_rows(p, args, batch, head);
    }
  }
};

class BackwardPass {
 public:
  BackwardPass(size_t jobs, int num_threads) : threads_(num_threads) { tasks_.reserve(jobs); }

  void add(const Problem& p, const BackwardArgs& args) {
    if (p.batch() == 0 || p.heads == 0) return;
    tasks_.emplace_back(p, args);
  }

  void run() {
    plan();
    const Buffer buffer(lay_out(nullptr));
    lay_out(buffer.data());
    int64_t rounds = 0;
    for (const Task& task : tasks_) rounds = std::max(rounds, task.sharing.positions());
    parallel_phases(threads_, int64_t(tasks_.size()), rounds,
                    {{[this](int64_t job) { return tasks_[job].items(); },
                      [this](const Item& item) { run_item(item); }},
                     {[this](int64_t job) { return tasks_[job].query_items(); },
                      [this](const Item& item) { finish_rows(item); }},
                     {[this](int64_t job) { return tasks_[job].head_items(); },
                      [this](const Item& item) { finish_heads(item); }}});
  }

 private:
  void plan() {
    Team team{1, 0};
    for (const Task& task : tasks_) team.flops += double(task.planes.count) * task.planes.flops;
    team.threads = usable_threads(threads_, team.flops);
    int64_t items = 0;
    for (Task& task : tasks_) {
      task.group_planes(team);
      items += std::max(task.items().count, task.head_items().count);
    }
    threads_ = int(std::clamp<int64_t>(items, 1, team.threads));
  }

  // Divides the memory of the call; returns its size.
  size_t lay_out(void* memory) {
    Arena arena(memory);
    workspace_bytes_ = 0;
    for (Task& t : tasks_) {
      if (t.splits > 0)
        workspace_bytes_ =
            std::max(workspace_bytes_,
                     t.kernels.backward_workspace(t.p, std::min(t.split_keys, t.p.seqlen_k)));
      t.partials = arena.take<char>(t.planes.count * t.parts * t.part_bytes());
      if (t.args.grad_alibi_slopes.data)
        t.slopes = arena.take<double>(t.planes.count * t.splits * t.p.group());
    }
    workspaces_ = arena.take<char>(int64_t(workspace_bytes_) * threads_);
    return arena.used();
  }

  void run_item(const Item& item) const {
    const Task& t = tasks_[item.job];
    if (item.round >= t.sharing.positions()) return;
    void* const workspace = workspaces_ + size_t(item.thread) * workspace_bytes_;
    if (t.by_plane) {
      const int64_t plane = t.sharing.plane(item.index, item.round);
      for (int64_t s = 0; s < t.splits; ++s) t.run_split(plane, item.index, s, workspace);
      t.finish_query(plane, item.index, 0, t.planes.rows);
      t.finish_heads(plane, item.index);
    } else {
      // Causal: the first keys are seen by the most rows, so they go first.
      const bool by_split = t.p.is_causal;
      const int64_t its_class = by_split ? item.index % t.planes.count : item.index / t.splits;
      const int64_t split = by_split ? item.index / t.planes.count : item.index % t.splits;
      t.run_split(t.sharing.plane(its_class, item.round), its_class, split, workspace);
    }
  }

  void finish_rows(const Item& item) const {
    const Task& t = tasks_[item.job];
    if (item.round >= t.sharing.positions()) return;
    const int64_t its_class = item.index / t.row_blocks();
    const int64_t row = item.index % t.row_blocks() * kGradRows;
    t.finish_query(t.sharing.plane(its_class, item.round), its_class, row,
                   std::min(t.planes.rows, row + kGradRows));
  }

  void finish_heads(const Item& item) const {
    const Task& t = tasks_[item.job];
    if (item.round >= t.sharing.positions()) return;
    t.finish_heads(t.sharing.plane(item.index, item.round), item.index);
  }

  int threads_;
  std::vector<Task> tasks_;
  size_t workspace_bytes_ = 0;
  char* workspaces_ = nullptr;
};

}  // namespace

void attention_backward(const Problem& problem, const BackwardArgs& args) {
  BackwardPass pass(1, problem.num_threads);
  pass.add(problem, args);
  pass.run();
}

void attention_backward(const std::vector<BackwardJob>& jobs) {
  if (jobs.empty()) return;
  BackwardPass pass(jobs.size(), jobs.front().problem.num_threads);
  for (const BackwardJob& job : jobs) pass.add(job.problem, job.args);
  pass.run();
}

}  // namespace qkv
