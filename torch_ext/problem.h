// From tensors to the kernel library's Problem.
#pragma once

#include "attention.h"
#include "check.h"

namespace qkv {

// A tensor and where its strides go. With lse's shape, it has no columns.
struct Operand {
  const at::Tensor* tensor;
  Strides* strides;
  bool has_columns = true;
};

// Everything but the strides.
Problem problem_of(const Forward& call, const Sizes<int64_t>& sizes);

// Sets problem.batch_* and the strides of all operands. Adjacent batch
// dimensions that all operands step through evenly become one; throws c10::Error if
// more than kMaxBatchRank are left.
void set_strides(Problem& problem, const Sizes<int64_t>& sizes, c10::ArrayRef<Operand> operands);

// Common to both directions: query, key, value and the mask.
c10::SmallVector<Operand, 12> operands_of(const Forward& call, Problem& problem);

}  // namespace qkv
