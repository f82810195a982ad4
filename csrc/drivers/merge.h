// Puts the parts of a row together after a forward pass that has split the keys.
#pragma once

#include "attention.h"

namespace qkv {

// The parts of all rows of one plane, in the compute type: for each split of the keys, the output
// of each row over the keys of that split, and the log-sum-exp of its scores there.
struct RowParts {
  void* output;     // [splits, rows, Dv]; that of the first split is overwritten
  const void* lse;  // [splits, rows]
  int64_t splits, rows;
};

// Writes row `row` of one plane (dispatch/kernel_table.h says which query that is) to the result.
void merge_row(const Problem& problem, const ForwardResult& result, int64_t batch, int64_t kv_head,
               int64_t row, const RowParts& parts);

}  // namespace qkv
