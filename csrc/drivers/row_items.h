// Passes in which every row stands for itself and sees all keys at once: hard attention, the dot
// products of weights, and forward-mode derivatives.
#pragma once

#include <functional>
#include <vector>

#include "attention.h"
#include "dispatch/kernel_table.h"

namespace qkv {

// Such a pass over one problem.
struct RowPass {
  const Problem& problem;
  const Kernels& kernels;
  // The bytes of workspace that `run` needs for an item of so many rows.
  std::function<size_t(int64_t rows)> workspace;
  std::function<void(const ForwardItem& item, void* workspace)> run;
};

// Runs the passes on items that together have every row of every plane of their problems, in
// parallel, on num_threads of the first one's problem.
void for_each_row_item(const std::vector<RowPass>& passes);

}  // namespace qkv
