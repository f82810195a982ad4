// The gradients that need no more than a few numbers of each query row.
#pragma once

#include "attention.h"

namespace qkv {

inline bool wants_grad_rows(const BackwardArgs& args) {
  return args.grad_sinks.data || args.grad_mask_queries.data;
}

// grad_sinks[b, h] and grad_mask_queries[b, h, :], where they are wanted.
void grad_rows(const Problem& problem, const BackwardArgs& args, int64_t batch, int64_t head);

}  // namespace qkv
