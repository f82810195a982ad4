// What goes row by row, each row against all keys: hard attention and the dot products of weights.
#pragma once

#include <functional>

#include "attention.h"
#include "dispatch/kernel_table.h"

namespace qkv {

struct RowPass {
  // The bytes of workspace that `run` needs for a block of so many rows.
  std::function<size_t(int64_t rows)> workspace;
  std::function<void(const ForwardBlock& block, void* workspace)> run;
};

// Runs the pass on blocks that cover every row of every plane, in parallel.
void for_each_row_block(const Problem& problem, const Kernels& kernels, const RowPass& pass);

}  // namespace qkv
