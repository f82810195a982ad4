// Passes in which every row stands for itself and sees all keys at once: hard attention, the dot
// products of weights, and forward-mode derivatives.
#pragma once

#include <functional>

#include "attention.h"
#include "dispatch/kernel_table.h"

namespace qkv {

// A kernel that works on such rows of a batch item; it returns how much workspace it needs, as
// those of Kernels do.
using RowKernel =
    std::function<size_t(const Problem& item, const ForwardItem& rows, void* workspace)>;

// Runs the kernel, one of `kernels`, on items that together have every row of every plane of the
// problem, in parallel.
void for_each_row_item(const Problem& problem, const Kernels& kernels, const RowKernel& kernel);

}  // namespace qkv
