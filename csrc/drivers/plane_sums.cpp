#include "plane_sums.h"

#include <algorithm>
#include <cstring>

namespace qkv {
namespace {

// Sums of keys up to so many bytes are made in memory of their own, which with a copy of it fits
// into a second-level cache of 512 KiB. In place, planes of 16 queries and keys (B H L S D:
// 64x4x16x16x32) took 1.13 times as long (Zen 3).
constexpr int64_t kSmallBytes = int64_t(128) << 10;

// to[batch, head, row] = x, rounded to the compute type.
void store_row(const Problem& p, const Output& to, int64_t batch, int64_t head, int64_t row,
               double x) {
  with_type(p.dtype, [&](auto element) {
    using T = Compute<decltype(element)>;
    query_plane<T>(p, to, batch, head)[row * to.strides.row] = T(x);
  });
}

double sum_of(const double* from, int64_t count, int64_t step) {
  double sum = 0;
  for (int64_t i = 0; i < count; ++i) sum += from[i * step];
  return sum;
}

}  // namespace

PlaneSums::PlaneSums(const Problem& p, const BackwardArgs& args, const Kernels& kernels,
                     const Grid& grid)
    : args_(args),
      kernels_(kernels),
      parts_(grid.parts()),
      group_(p.group()),
      head_dim_(p.head_dim),
      head_dim_v_(p.head_dim_v),
      lanes_(kernels.lanes),
      element_(size_of(compute_type(p.dtype))),
      rows_(group_ * p.seqlen_q),
      keys_(p.seqlen_k),
      blocks_(ceil_div(rows_, kGradRows)),
      query_in_place_(parts_ == 1 && is_sum(p, args.grad_query, p.head_dim)),
      key_in_place_(are_keys_sum(p, args.grad_key, p.head_dim)),
      value_in_place_(are_keys_sum(p, args.grad_value, p.head_dim_v)),
      has_heads_(std::any_of(args.grad_by_head.begin(), args.grad_by_head.end(),
                             [](const Output& grad) { return grad.data != nullptr; }) ||
                 std::any_of(args.grad_masks.begin(), args.grad_masks.end(),
                             [](const GradMask& grad) { return grad.queries.data != nullptr; })) {}

bool PlaneSums::is_sum(const Problem& p, const Output& grad, int64_t dim) const {
  return p.dtype == compute_type(p.dtype) && grad.strides.col == 1 && dim % lanes_ == 0;
}

// Rows that are far apart would fall into few sets of the first-level cache; and small sums are in
// the cache if every plane has the same memory for them.
bool PlaneSums::are_keys_sum(const Problem& p, const Output& grad, int64_t dim) const {
  return is_sum(p, grad, dim) && grad.strides.row == dim && keys_ * dim * element_ > kSmallBytes;
}

BackwardSums PlaneSums::take(Arena& arena) const {
  const auto rows = [&](const Output& grad, bool in_place, int64_t count, int64_t dim) -> void* {
    const bool takes = grad.data && !in_place;
    return takes ? arena.take<char>(count * padded(dim) * element_) : nullptr;
  };
  BackwardSums own;
  own.query_head = padded(head_dim_), own.query_row = group_ * own.query_head;
  own.grad_query = rows(args_.grad_query, query_in_place_, parts_ * rows_, head_dim_);
  own.query_sums = arena.take<QuerySums>(parts_ * blocks_);
  own.grad_key = rows(args_.grad_key, key_in_place_, keys_, head_dim_);
  own.grad_value = rows(args_.grad_value, value_in_place_, keys_, head_dim_v_);
  for (int n = 0; n < kHeadNumbers; ++n)
    if (is_sum_over_keys(n) && args_.grad_by_head[n].data)
      own.by_head[n] = arena.take<double>(parts_ * blocks_ * group_);
  for (int m = 0; m < kMasks; ++m) {
    const GradMask& grad = args_.grad_masks[m];
    if (grad.queries.data) own.mask_rows[m] = arena.take<double>(parts_ * rows_);
    if (grad.keys.data) own.mask_keys[m] = arena.take<char>(keys_ * group_ * element_);
  }
  return own;
}

int64_t PlaneSums::bytes() const {
  Arena arena(nullptr);
  take(arena);
  return int64_t(arena.used());
}

BackwardSums PlaneSums::of_part(const Problem& p, const Plane& plane, int64_t part,
                                const BackwardSums& own) const {
  const auto in_place = [&](const Output& grad, int64_t offset) {
    return element_at<char>(grad, offset * element_);
  };
  BackwardSums sums = own;
  sums.query_sums += part * blocks_;
  const Strides& query = args_.grad_query.strides;
  if (query_in_place_) {
    sums.grad_query =
        in_place(args_.grad_query, query_offset(p, query, plane.batch, plane.kv_head * group_));
    sums.query_row = query.row, sums.query_head = query.head;
  } else if (own.grad_query) {
    sums.grad_query = static_cast<char*>(own.grad_query) + part * query_bytes();
  }
  const auto key_at = [&](const Output& grad) {
    return in_place(grad, key_offset(p, grad.strides, plane));
  };
  if (key_in_place_) sums.grad_key = key_at(args_.grad_key);
  if (value_in_place_) sums.grad_value = key_at(args_.grad_value);
  for (double*& of : sums.by_head)
    if (of) of += part * blocks_ * group_;
  for (double*& of : sums.mask_rows)
    if (of) of += part * rows_;
  return sums;
}

void PlaneSums::clear_rows(const BackwardSums& sums, Range rows) const {
  if (rows.is_empty()) return;
  const Range blocks{rows.begin / kGradRows, ceil_div(rows.end, kGradRows)};
  std::fill(sums.query_sums + blocks.begin, sums.query_sums + blocks.end, QuerySums::none);
  for (double* of : sums.by_head)
    if (of) std::fill(of + blocks.begin * group_, of + blocks.end * group_, 0.);
  for (double* of : sums.mask_rows)
    if (of) std::fill(of + rows.begin, of + rows.end, 0.);
}

void PlaneSums::clear_keys(const BackwardSums& sums, Range keys) const {
  if (keys.is_empty()) return;
  const auto clear = [&](void* of, int64_t size) {
    if (of)
      std::memset(static_cast<char*>(of) + keys.begin * size * element_, 0,
                  size_t((keys.end - keys.begin) * size * element_));
  };
  clear(sums.grad_key, padded(head_dim_));
  clear(sums.grad_value, padded(head_dim_v_));
  for (void* of : sums.mask_keys) clear(of, group_);
}

void PlaneSums::finish_rows(const Problem& p, const Plane& plane, Range rows,
                            const BackwardSums& first) const {
  if (!args_.grad_query.data) return;
  kernels_.finish_rows(p, args_,
                       {plane, rows.begin, rows.end, first, parts_, query_bytes(), blocks_});
}

void PlaneSums::finish_keys(const Problem& p, const Plane& plane, Range keys,
                            const BackwardSums& sums) const {
  kernels_.finish_keys(p, args_, {plane, keys.begin, keys.end, sums});
}

void PlaneSums::finish_heads(const Problem& p, const Plane& plane, const BackwardSums& own) const {
  if (!has_heads_) return;
  const int64_t batch = plane.batch;
  for (int64_t g = 0; g < group_; ++g) {
    const int64_t head = plane.kv_head * group_ + g;
    for (int n = 0; n < kHeadNumbers; ++n)
      if (own.by_head[n])
        *qkv::plane<double>(p, args_.grad_by_head[n], batch, head) =
            sum_of(own.by_head[n] + g, parts_ * blocks_, group_);
    for (int m = 0; m < kMasks; ++m)
      for (int64_t i = 0; i < p.seqlen_q && own.mask_rows[m]; ++i)
        store_row(p, args_.grad_masks[m].queries, batch, head, i,
                  sum_of(own.mask_rows[m] + i * group_ + g, parts_, rows_));
    if (args_.grad_by_head[kSinks].data) grad_sink(p, args_, batch, head);
  }
}

}  // namespace qkv
