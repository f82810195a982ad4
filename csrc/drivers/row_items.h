// Passes in which every row stands for itself and sees all keys at once: hard attention, and the
// dot products of weights.
#pragma once

#include <functional>

#include "attention.h"
#include "dispatch/kernel_table.h"

namespace qkv {

struct RowPass {
  // The bytes of workspace that `run` needs for an item of so many rows.
  std::function<size_t(int64_t rows)> workspace;
  std::function<void(const ForwardItem& item, void* workspace)> run;
};

// Runs the pass on items that together have every row of every plane, in parallel.
void for_each_row_item(const Problem& problem, const Kernels& kernels, const RowPass& pass);

}  // namespace qkv
