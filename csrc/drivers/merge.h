// The forward pass of rows whose keys were split: puts the parts of a row together.
#pragma once

#include "attention.h"

namespace qkv {

// What the splits made of the rows of one plane, in the compute type: the output of each row over
// the keys of one split, and the log-sum-exp of the scores in that split.
struct RowParts {
  void* output;     // [splits, rows, Dv]; that of the first split is overwritten
  const void* lse;  // [splits, rows]
  int64_t splits, rows;
};

// Writes row `row` of one plane (dispatch/kernel_table.h says which query that is) to the result.
void merge_row(const Problem& problem, const ForwardResult& result, int64_t batch, int64_t kv_head,
               int64_t row, const RowParts& parts);

}  // namespace qkv
