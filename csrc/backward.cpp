// Splits a backward pass into work items.
#include <algorithm>
#include <cstring>

#include "attention.h"
#include "isa/implementation.h"
#include "parallel.h"
#include "reference/reference.h"
#include "strides.h"
#include "workspace.h"

namespace qkv {
namespace {

// The keys of one plane (batch item and kv head) are split, so that one head
// alone can use every core. Each split sums its own grad_query; the sums are
// added in order of keys. The split, and so every result, follows from the
// shape of one plane alone; who computes it when does not matter.
constexpr int64_t kSplitKeys = 256;  // about, at least: below, adding up the parts shows
constexpr int64_t kMaxSplits = 8;
// Parts cost memory; past this, half as many.
constexpr int64_t kMaxPartBytes = int64_t(32) << 20;

struct Plan {
  int64_t rows, planes;
  int64_t split_keys, splits;
  bool by_plane;  // an item is a whole plane, splits one after the other: no parts
  double flops;
  int num_threads;
};

Plan make_plan(const Problem& p, int64_t element) {
  Plan plan;
  plan.rows = p.group() * p.seqlen_q;
  plan.planes = p.batch() * p.kv_heads;
  const int64_t part_bytes = plan.rows * p.head_dim * element;
  int64_t splits = std::min(kMaxSplits, std::max<int64_t>(1, p.seqlen_k / kSplitKeys));
  if ((splits - 1) * part_bytes > kMaxPartBytes) splits = std::min(splits, kMaxSplits / 2);
  plan.split_keys = ceil_div(p.seqlen_k, splits);
  plan.splits = ceil_div(p.seqlen_k, plan.split_keys);

  plan.flops = 5.0 * plan.planes * plan.rows * p.seqlen_k * (p.head_dim + p.head_dim_v);
  plan.num_threads = usable_threads(p.num_threads, plan.flops);
  // Whole planes when they fill the threads evenly, or nearly so.
  plan.by_plane = plan.num_threads == 1 || plan.splits <= 1 ||
                  plan.planes % plan.num_threads == 0 || plan.planes >= 4 * plan.num_threads;
  const int64_t items = plan.planes * (plan.by_plane ? 1 : plan.splits);
  plan.num_threads = int(std::max<int64_t>(1, std::min<int64_t>(plan.num_threads, items)));
  return plan;
}

template <class T>
void backward(const Problem& p, const BackwardArgs& args, const Kernels& kernels) {
  const Plan plan = make_plan(p, sizeof(T));
  const size_t each = kernels.backward_workspace(p, std::min(plan.split_keys, p.seqlen_k));
  const int64_t part = plan.rows * p.head_dim;
  const int64_t parts = plan.by_plane || !args.grad_query.data ? 0 : plan.splits - 1;
  const Buffer workspaces(each * plan.num_threads);
  const Buffer partials(size_t(plan.planes * parts * part) * sizeof(T));

  const auto run_split = [&](int64_t plane_index, int64_t split, int thread) {
    T* partial = parts && split
                     ? static_cast<T*>(partials.data()) + (plane_index * parts + split - 1) * part
                     : nullptr;
    const BackwardBlock block{plane_index / p.kv_heads,
                              plane_index % p.kv_heads,
                              split * plan.split_keys,
                              std::min(p.seqlen_k, (split + 1) * plan.split_keys),
                              partial,
                              split > 0 && !partial};
    kernels.backward(p, args, block, static_cast<char*>(workspaces.data()) + thread * each);
  };
  const auto finish = [&](int64_t plane_index, int64_t row_begin, int64_t row_end) {
    if (!args.grad_query.data) return;
    const T* partial = static_cast<const T*>(partials.data()) + plane_index * parts * part;
    kernels.finish_grad_query(p, args,
                              {plane_index / p.kv_heads, plane_index % p.kv_heads, row_begin,
                               row_end, plan.split_keys, parts, partial});
  };
  if (plan.by_plane) {
    parallel_phases(plan.num_threads,
                    {{plan.planes, plan.flops / plan.planes, [&](int64_t plane_index, int thread) {
                        for (int64_t s = 0; s < plan.splits; ++s) run_split(plane_index, s, thread);
                        finish(plane_index, 0, plan.rows);
                      }}});
    return;
  }
  const int64_t row_items = ceil_div(plan.rows, kGradRows);
  parallel_phases(
      plan.num_threads,
      {{plan.planes * plan.splits, plan.flops / (plan.planes * plan.splits),
        [&](int64_t item, int thread) {
          run_split(item / plan.splits, item % plan.splits, thread);
        }},
       {plan.planes * row_items, double(kGradRows * p.head_dim * parts), [&](int64_t item, int) {
          const int64_t row = item % row_items * kGradRows;
          finish(item / row_items, row, std::min(plan.rows, row + kGradRows));
        }}});
}

// Without keys there is nothing to sum: grad_query is zero.
template <class T>
void clear_grad_query(const Problem& p, const BackwardArgs& args) {
  const Strides& s = args.grad_query.strides;
  for (int64_t b = 0; b < p.batch(); ++b)
    for (int64_t h = 0; h < p.heads; ++h)
      for (int64_t i = 0; i < p.seqlen_q; ++i)
        for (int64_t d = 0; d < p.head_dim; ++d)
          plane<T>(p, args.grad_query, b, h)[i * s.row + d * s.col] = 0;
}

}  // namespace

void attention_backward(const Problem& problem, const BackwardArgs& args) {
  if (problem.batch() == 0 || problem.heads == 0) return;
  if (reference::needs_reference(problem) || args.grad_weights.data || args.grad_mask.data ||
      args.grad_mask_keys.data || args.grad_mask_queries.data || args.weights.data)
    return reference::attention_backward(problem, args);
  const Kernels& kernels = active_implementation().kernels(problem.dtype);
  const bool f32 = problem.dtype == DType::f32;
  if (problem.seqlen_k == 0) {
    if (args.grad_query.data)
      (f32 ? clear_grad_query<float> : clear_grad_query<double>)(problem, args);
    return;
  }
  (f32 ? backward<float> : backward<double>)(problem, args, kernels);
}

}  // namespace qkv
