#include "plane_sums.h"

#include <algorithm>
#include <cstring>

#include "common/strides.h"
#include "grad_sinks.h"

namespace qkv {
namespace {

// Sums of keys up to this size are made in memory of their own, beside a copy of which they fit
// into a second-level cache of 512 KiB. In place, tiny (64x4x16x16x32) took 1.13 times as long (Zen
// 3).
constexpr int64_t kSmallBytes = int64_t(128) << 10;

// to[batch, head, row] = x, rounded to the compute type.
void store_row(const Problem& p, const Output& to, int64_t batch, int64_t head, int64_t row,
               double x) {
  const int64_t at = row * to.strides.row;
  if (compute_type(p.dtype) == DType::f32) {
    plane<float>(p, to, batch, head)[at] = float(x);
  } else {
    plane<double>(p, to, batch, head)[at] = x;
  }
}

char* element_of(const Problem& p, const Output& to, int64_t batch, int64_t head) {
  return static_cast<char*>(to.data) + plane_offset(p, to.strides, batch, head) * size_of(p.dtype);
}

double sum_of(const double* from, int64_t count, int64_t step) {
  double sum = 0;
  for (int64_t i = 0; i < count; ++i) sum += from[i * step];
  return sum;
}

}  // namespace

PlaneSums::PlaneSums(const Problem& p, const BackwardArgs& args, const Kernels& kernels,
                     const Grid& grid)
    : p_(p),
      args_(args),
      kernels_(kernels),
      grid_(grid),
      lanes_(kernels.lanes),
      element_(size_of(compute_type(p.dtype))),
      rows_(p.group() * p.seqlen_q),
      blocks_((rows_ + kGradRows - 1) / kGradRows),
      query_in_place_(grid.parts() == 1 && is_sum(args.grad_query, p.head_dim)),
      key_in_place_(are_keys_sum(args.grad_key, p.head_dim)),
      value_in_place_(are_keys_sum(args.grad_value, p.head_dim_v)),
      has_heads_(args.grad_alibi_slopes.data || args.grad_sinks.data ||
                 std::any_of(args.grad_masks.begin(), args.grad_masks.end(),
                             [](const GradMask& grad) { return grad.queries.data != nullptr; })) {}

bool PlaneSums::is_sum(const Output& grad, int64_t dim) const {
  return p_.dtype == compute_type(p_.dtype) && grad.strides.col == 1 && dim % lanes_ == 0;
}

// Rows that are far apart would fall into few sets of the first-level cache; and small sums are in
// the cache if every plane has the same memory for them.
bool PlaneSums::are_keys_sum(const Output& grad, int64_t dim) const {
  return is_sum(grad, dim) && grad.strides.row == dim && p_.seqlen_k * dim * element_ > kSmallBytes;
}

PlaneSums::Memory PlaneSums::take(Arena& arena) const {
  const auto rows = [&](const Output& grad, bool in_place, int64_t count, int64_t dim) {
    const bool takes = grad.data && !in_place;
    return takes ? arena.take<char>(count * padded(dim) * element_) : nullptr;
  };
  Memory memory{rows(args_.grad_query, query_in_place_, grid_.parts() * rows_, p_.head_dim),
                arena.take<QuerySums>(grid_.parts() * blocks_),
                rows(args_.grad_key, key_in_place_, p_.seqlen_k, p_.head_dim),
                rows(args_.grad_value, value_in_place_, p_.seqlen_k, p_.head_dim_v),
                nullptr,
                {},
                {}};
  if (args_.grad_alibi_slopes.data)
    memory.grad_slopes = arena.take<double>(grid_.parts() * blocks_ * p_.group());
  for (int m = 0; m < kMasks; ++m) {
    const GradMask& grad = args_.grad_masks[m];
    if (grad.queries.data) memory.mask_rows[m] = arena.take<double>(grid_.parts() * rows_);
    if (grad.keys.data)
      memory.mask_keys[m] = arena.take<char>(p_.seqlen_k * p_.group() * lanes_ * element_);
  }
  return memory;
}

int64_t PlaneSums::bytes() const {
  Arena arena(nullptr);
  take(arena);
  return int64_t(arena.used());
}

BackwardSums PlaneSums::of(int64_t plane, int64_t part, const Memory& memory) const {
  const int64_t batch = plane / p_.kv_heads, kv_head = plane % p_.kv_heads;
  BackwardSums sums;
  sums.query_sums = memory.query_sums + part * blocks_;
  if (args_.grad_query.data && query_in_place_) {
    sums.grad_query = element_of(p_, args_.grad_query, batch, kv_head * p_.group());
    sums.query_row = args_.grad_query.strides.row, sums.query_head = args_.grad_query.strides.head;
  } else if (args_.grad_query.data) {
    sums.grad_query = memory.grad_query + part * rows_ * padded(p_.head_dim) * element_;
    sums.query_head = padded(p_.head_dim), sums.query_row = p_.group() * sums.query_head;
  }
  if (args_.grad_key.data)
    sums.grad_key =
        key_in_place_ ? element_of(p_, args_.grad_key, batch, kv_head) : memory.grad_key;
  if (args_.grad_value.data)
    sums.grad_value =
        value_in_place_ ? element_of(p_, args_.grad_value, batch, kv_head) : memory.grad_value;
  if (memory.grad_slopes) sums.grad_slopes = memory.grad_slopes + part * blocks_ * p_.group();
  for (int m = 0; m < kMasks; ++m) {
    if (memory.mask_rows[m]) sums.mask_rows[m] = memory.mask_rows[m] + part * rows_;
    sums.mask_keys[m] = memory.mask_keys[m];
  }
  return sums;
}

void PlaneSums::clear_rows(const BackwardSums& sums, const Range& rows) const {
  if (rows.is_empty()) return;
  const Range blocks{rows.begin / kGradRows, (rows.end + kGradRows - 1) / kGradRows};
  std::fill(sums.query_sums + blocks.begin, sums.query_sums + blocks.end, QuerySums::none);
  if (sums.grad_slopes)
    std::fill(sums.grad_slopes + blocks.begin * p_.group(),
              sums.grad_slopes + blocks.end * p_.group(), 0.);
  for (double* of : sums.mask_rows)
    if (of) std::fill(of + rows.begin, of + rows.end, 0.);
}

void PlaneSums::clear_keys(const BackwardSums& sums, const Range& keys) const {
  if (keys.is_empty()) return;
  const auto clear = [&](void* of, int64_t size) {
    if (of)
      std::memset(static_cast<char*>(of) + keys.begin * size * element_, 0,
                  size_t((keys.end - keys.begin) * size * element_));
  };
  clear(sums.grad_key, padded(p_.head_dim));
  clear(sums.grad_value, padded(p_.head_dim_v));
  for (void* of : sums.mask_keys) clear(of, p_.group() * lanes_);
}

void PlaneSums::finish_rows(int64_t plane, const Range& rows, const BackwardSums& first) const {
  if (!args_.grad_query.data) return;
  kernels_.finish_rows(p_, args_,
                       {plane / p_.kv_heads, plane % p_.kv_heads, rows.begin, rows.end, first,
                        grid_.parts(), rows_ * padded(p_.head_dim) * element_, blocks_});
}

void PlaneSums::finish_keys(int64_t plane, const Range& keys, const BackwardSums& sums) const {
  kernels_.finish_keys(p_, args_,
                       {plane / p_.kv_heads, plane % p_.kv_heads, keys.begin, keys.end, sums});
}

void PlaneSums::finish_heads(int64_t plane, const Memory& memory) const {
  if (!has_heads_) return;
  const int64_t batch = plane / p_.kv_heads, group = p_.group();
  for (int64_t g = 0; g < group; ++g) {
    const int64_t head = plane % p_.kv_heads * group + g;
    if (memory.grad_slopes)
      *qkv::plane<double>(p_, args_.grad_alibi_slopes, batch, head) =
          sum_of(memory.grad_slopes + g, grid_.parts() * blocks_, group);
    for (int m = 0; m < kMasks; ++m)
      for (int64_t i = 0; i < p_.seqlen_q && memory.mask_rows[m]; ++i)
        store_row(p_, args_.grad_masks[m].queries, batch, head, i,
                  sum_of(memory.mask_rows[m] + i * group + g, grid_.parts(), rows_));
    if (args_.grad_sinks.data) grad_sink(p_, args_, batch, head);
  }
}

}  // namespace qkv
