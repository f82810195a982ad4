// Rows that are independent of each other, each against all keys.
#pragma once

#include <functional>

#include "attention.h"
#include "dispatch/kernel_table.h"

namespace qkv {

struct RowPass {
  // Bytes that `run` needs for a block of so many rows.
  std::function<size_t(int64_t rows)> workspace;
  std::function<void(const ForwardBlock& block, void* workspace)> run;
};

// Blocks that cover every row of every plane, in parallel.
void for_each_row_block(const Problem& problem, const Kernels& kernels, const RowPass& pass);

}  // namespace qkv
