// Puts a row together whose keys were split.
#pragma once

#include "attention.h"

namespace qkv {

// What each split made of the rows of one plane: normalized rows, with the
// log-sum-exp that goes with them; both in the compute type.
struct RowParts {
  void* output;     // [splits, rows, Dv], the first overwritten
  const void* lse;  // [splits, rows]
  int64_t splits, rows;
};

// Writes row `row` of the plane (dispatch/kernel_table.h) to the result.
void merge_row(const Problem& problem, const ForwardResult& result, int64_t batch, int64_t kv_head,
               int64_t row, const RowParts& parts);

}  // namespace qkv
