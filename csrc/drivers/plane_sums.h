// The memory to which the cells of a plane add (BackwardSums): the gradients themselves where they
// can be, else memory of a plane's own.
#pragma once

#include "attention.h"
#include "cells.h"
#include "common/workspace.h"
#include "dispatch/kernel_table.h"

namespace qkv {

// Whether the gradient of what heads have of these (HeadNumber) is a sum over keys: that of the
// sinks is made of what the backward pass has of each row (grad_sinks.cpp).
constexpr bool is_sum_over_keys(int number) { return number != kSinks; }

// Computes args.grad_by_head[kSinks][batch, head], one double, from the rows of that head. It needs
// no key: what the backward pass has of each row is enough.
void grad_sink(const Problem& problem, const BackwardArgs& args, int64_t batch, int64_t head);

class PlaneSums {
 public:
  // Of any batch item of a stretch: what follows from its sizes alone is the same for all. The
  // arguments must outlive this. What is done for one plane is given the problem of its item.
  PlaneSums(const Problem& item, const BackwardArgs& args, const Kernels& kernels,
            const Grid& grid);

  // Memory of one plane's own for the sums of all its parts, of which grad_query, query_sums,
  // by_head and mask_rows have one after the other. Null: not needed, or not wanted.
  BackwardSums take(Arena& arena) const;
  // How many bytes that takes.
  int64_t bytes() const;

  // The sums of one part, in memory of the plane's own and in gradients.
  BackwardSums of_part(const Problem& p, const Plane& plane, int64_t part,
                       const BackwardSums& own) const;
  // Set the sums of some rows, or keys, of a plane to 0.
  void clear_rows(const BackwardSums& sums, Range rows) const;
  void clear_keys(const BackwardSums& sums, Range keys) const;

  // Complete the gradients of some rows, or keys, or of what belongs to heads.
  // `first`: the sums of the first part; `own`: what take() has returned.
  void finish_rows(const Problem& p, const Plane& plane, Range rows,
                   const BackwardSums& first) const;
  void finish_keys(const Problem& p, const Plane& plane, Range keys,
                   const BackwardSums& sums) const;
  void finish_heads(const Problem& p, const Plane& plane, const BackwardSums& own) const;

 private:
  int64_t padded(int64_t dim) const { return ceil_div(dim, lanes_) * lanes_; }
  // The bytes of a part's sums of grad_query.
  int64_t query_bytes() const { return rows_ * padded(head_dim_) * element_; }
  // Whether a gradient whose last dimension is `dim` can be its own sum.
  bool is_sum(const Problem& p, const Output& grad, int64_t dim) const;
  bool are_keys_sum(const Problem& p, const Output& grad, int64_t dim) const;

  const BackwardArgs& args_;
  const Kernels& kernels_;
  int64_t parts_;  // of the keys
  int64_t group_, head_dim_, head_dim_v_, lanes_, element_;
  int64_t rows_, keys_, blocks_;  // of a plane
  bool query_in_place_, key_in_place_, value_in_place_;
  bool has_heads_;  // whether something is wanted of each head
};

}  // namespace qkv
