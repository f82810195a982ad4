// Splits a forward pass into work items.
#include <algorithm>
#include <cmath>
#include <limits>

#include "attention.h"
#include "isa/implementation.h"
#include "parallel.h"
#include "reference/reference.h"
#include "repair.h"
#include "strides.h"
#include "workspace.h"

namespace qkv {
namespace {

// Keys of one item when the keys are split: a few hundred microseconds of
// reading from memory.
constexpr int64_t kSplitKeys = 512;
// Rows of one item: enough to use a block of keys several times while it is in
// the second-level cache. Fewer where that leaves threads idle.
constexpr int64_t kItemRows = 128;
// Items a thread should have, so that the last one is a small part of the whole.
constexpr int64_t kItemsPerThread = 6;

struct Plan {
  int64_t rows;    // G * L, of one batch item and kv head
  int64_t planes;  // batch items times kv heads
  int64_t item_rows, row_items;
  int64_t split_keys, splits;
  bool by_plane;  // an item is a whole plane, its splits one after the other
  double flops;
  int num_threads;

  int64_t items() const { return by_plane ? planes : planes * row_items * splits; }
};

Plan make_plan(const Problem& p, const Kernels& kernels) {
  Plan plan;
  plan.rows = p.group() * p.seqlen_q;
  plan.planes = p.batch() * p.kv_heads;
  // Few queries and many keys: split the keys. The order of summation follows
  // from it, so it depends on the shape of one plane alone.
  const bool split = plan.rows <= 2 * kernels.row_block && p.seqlen_k > kSplitKeys;
  plan.split_keys = split ? kSplitKeys : std::max<int64_t>(p.seqlen_k, 1);
  plan.splits = std::max<int64_t>(1, ceil_div(p.seqlen_k, plan.split_keys));

  plan.flops = 2.0 * plan.planes * plan.rows * p.seqlen_k * (p.head_dim + p.head_dim_v);
  plan.num_threads = usable_threads(p.num_threads, plan.flops);

  // Rows are independent of each other: how they are grouped into items changes
  // no result, and may follow the number of threads.
  const int64_t wanted = ceil_div(kItemsPerThread * plan.num_threads, plan.planes * plan.splits);
  plan.item_rows = std::min(kItemRows, ceil_div(plan.rows, wanted));
  plan.item_rows =
      std::max<int64_t>(1, ceil_div(plan.item_rows, kernels.row_block)) * kernels.row_block;
  plan.row_items = ceil_div(plan.rows, plan.item_rows);
  // Partial results wait in memory, so as few as keep the threads busy.
  plan.by_plane = plan.splits > 1 && plan.planes >= kItemsPerThread * plan.num_threads;
  plan.num_threads = int(std::clamp<int64_t>(plan.items(), 1, plan.num_threads));
  return plan;
}

// Partial results of all splits: normalized rows and their log-sum-exp. A slot
// is a plane or, if an item is a whole plane, a thread.
template <class T>
struct Partials {
  T* output;  // [slots, splits, rows, Dv]
  T* lse;     // [slots, splits, rows]

  Partials(Arena& arena, const Problem& p, const Plan& plan) {
    const int64_t slots = plan.splits == 1 ? 0 : plan.by_plane ? plan.num_threads : plan.planes;
    output = arena.take<T>(slots * plan.splits * plan.rows * p.head_dim_v);
    lse = arena.take<T>(slots * plan.splits * plan.rows);
  }
};

// One row's parts, weighted by their shares of the softmax's denominator. Parts
// that saw no key (-inf) are left out; a part with a NaN makes the row NaN.
template <class T>
void merge_row(const Problem& p, const ForwardResult& result, const Plan& plan,
               const Partials<T>& partials, int64_t plane_index, int64_t slot, int64_t row) {
  const int64_t batch = plane_index / p.kv_heads, kv_head = plane_index % p.kv_heads;
  const int64_t head = kv_head * p.group() + row % p.group(), query = row / p.group();
  const int64_t first = slot * plan.splits * plan.rows + row, Dv = p.head_dim_v;
  T* output = plane<T>(p, result.output, batch, head) + query * result.output.strides.row;
  const int64_t col = result.output.strides.col;
  constexpr T kInf = std::numeric_limits<T>::infinity();

  T max = -kInf;
  for (int64_t s = 0; s < plan.splits; ++s)
    max = std::max(max, partials.lse[first + s * plan.rows]);
  for (int64_t d = 0; d < Dv; ++d) output[d * col] = 0;
  T sum = 0;
  for (int64_t s = 0; s < plan.splits; ++s) {
    const int64_t at = first + s * plan.rows;
    if (partials.lse[at] == -kInf) continue;
    const T share = std::exp(partials.lse[at] - max);
    sum += share;
    for (int64_t d = 0; d < Dv; ++d) output[d * col] += share * partials.output[at * Dv + d];
  }
  if (result.lse.data)
    plane<T>(p, result.lse, batch, head)[query * result.lse.strides.row] =
        T(double(max) + std::log(double(sum)));
  if (sum == 0) return;  // nothing to attend to
  T zero = 0;
  for (int64_t d = 0; d < Dv; ++d) {
    output[d * col] /= sum;
    zero += output[d * col] * 0;
  }
  if (may_leak(p) && !(zero == 0)) repair_output(p, result, batch, kv_head, row, double(sum));
}

// The memory of one call.
template <class T>
struct Memory {
  char* workspaces;  // [threads, each]
  Partials<T> partials;

  Memory(Arena& arena, const Problem& p, const Plan& plan, size_t each)
      : workspaces(arena.take<char>(int64_t(each) * plan.num_threads)), partials(arena, p, plan) {}
};

template <class T>
void forward(const Problem& p, const ForwardResult& result, const Kernels& kernels) {
  const Plan plan = make_plan(p, kernels);
  const bool split = plan.splits > 1;
  const size_t each = kernels.forward_workspace(p, std::min(plan.item_rows, plan.rows));
  Arena counting(nullptr);
  Memory<T>(counting, p, plan, each);
  const Buffer buffer(counting.used());
  Arena arena(buffer.data());
  const Memory<T> memory(arena, p, plan, each);

  const auto attend = [&](int64_t plane_index, int64_t at, int64_t row, int64_t slot, int thread) {
    const int64_t first = (slot * plan.splits + at) * plan.rows + row;
    const ForwardBlock block{plane_index / p.kv_heads,
                             plane_index % p.kv_heads,
                             row,
                             std::min(plan.rows, row + plan.item_rows),
                             at * plan.split_keys,
                             std::min(p.seqlen_k, (at + 1) * plan.split_keys),
                             split ? memory.partials.output + first * p.head_dim_v : nullptr,
                             split ? memory.partials.lse + first : nullptr};
    kernels.forward(p, result, block, memory.workspaces + thread * each);
  };
  const auto run_item = [&](int64_t item, int thread) {
    const int64_t at = item / plan.row_items % plan.splits;
    const int64_t plane_index = item / (plan.row_items * plan.splits);
    // Causal: the last rows see the most keys, so they go first.
    const int64_t row = (plan.row_items - 1 - item % plan.row_items) * plan.item_rows;
    attend(plane_index, at, row, plane_index, thread);
  };
  const auto merge = [&](int64_t item, int) {
    const int64_t plane_index = item / plan.rows;
    merge_row(p, result, plan, memory.partials, plane_index, plane_index, item % plan.rows);
  };
  const auto run_plane = [&](int64_t plane_index, int thread) {
    for (int64_t at = 0; at < plan.splits; ++at)
      for (int64_t row = 0; row < plan.rows; row += plan.item_rows)
        attend(plane_index, at, row, thread, thread);
    for (int64_t row = 0; row < plan.rows; ++row)
      merge_row(p, result, plan, memory.partials, plane_index, thread, row);
  };
  if (plan.by_plane) {
    parallel_phases(plan.num_threads, {{plan.planes, plan.flops / plan.planes, run_plane}});
  } else {
    parallel_phases(plan.num_threads, {{plan.items(), plan.flops / plan.items(), run_item},
                                       {split ? plan.planes * plan.rows : 0,
                                        double(p.head_dim_v * plan.splits), merge}});
  }
}

}  // namespace

void attention_forward(const Problem& problem, const ForwardResult& result) {
  if (problem.batch() == 0 || problem.heads == 0 || problem.seqlen_q == 0) return;
  if (reference::needs_reference(problem)) return reference::attention_forward(problem, result);
  const Kernels& kernels = active_implementation().kernels(problem.dtype);
  if (problem.dtype == DType::f32) {
    forward<float>(problem, result, kernels);
  } else {
    forward<double>(problem, result, kernels);
  }
}

}  // namespace qkv
