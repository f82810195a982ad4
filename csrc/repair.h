// What is masked must not leak. A masked pair has weight exactly 0, but 0 * NaN
// and 0 * inf are NaN, so a kernel that multiplies by it can spoil a row. The
// kernels do so, look at what they wrote, and call these for the rows that are
// not finite; the rare row that is wrong is computed again, pair by pair, with
// the masked ones left out. Rows that are NaN by right are left alone, so that
// a model that has diverged does not become slow as well. None of them allocates
// memory: threads call them, and could not report that there is none.
#pragma once

#include "attention.h"
#include "visible.h"

namespace qkv {

// Whether any pair of this problem can be masked.
inline bool may_leak(const Problem& problem) {
  return hides_positions(problem) || problem.mask_type != MaskType::none;
}

// row: see isa/implementation.h. sum: the softmax's denominator, NaN if any
// score of the row or its sink is.
void repair_output(const Problem& problem, const ForwardResult& result, int64_t batch,
                   int64_t kv_head, int64_t row, double sum);
void repair_grad_query(const Problem& problem, const BackwardArgs& args, int64_t batch,
                       int64_t kv_head, int64_t row);
void repair_grad_key_value(const Problem& problem, const BackwardArgs& args, int64_t batch,
                           int64_t kv_head, int64_t key);

}  // namespace qkv
