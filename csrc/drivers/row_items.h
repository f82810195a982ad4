// Passes in which every row stands for itself and sees all keys at once: hard attention, the dot
// products of weights, and forward-mode derivatives.
#pragma once

#include <functional>

#include "attention.h"
#include "dispatch/kernel_table.h"

namespace qkv {

struct RowPass {
  const Kernels& kernels;
  // The bytes of workspace that `run` needs for so many rows of a batch item.
  std::function<size_t(const Problem& item, int64_t rows)> workspace;
  std::function<void(const Problem& item, const ForwardItem& rows, void* workspace)> run;
};

// Runs the pass on items that together have every row of every plane of the problem, in parallel.
void for_each_row_item(const Problem& problem, const RowPass& pass);

}  // namespace qkv
