// What stands in for torch's own kernels while sdpa is replaced. Each hands what it does not cover
// to the kernel that it stands in for, and counts it.
#pragma once

#include <torch/library.h>

namespace qkv::replace {

// Of aten::scaled_dot_product_attention.
torch::CppFunction attention_kernel();
// Of aten::_native_multi_head_attention, for dense and for strided nested tensors on the CPU.
torch::CppFunction multi_head_kernel();

// The functions of torch that are replaced.
enum class Function : int8_t { attention, multi_head, count };

// Who computes a call: qkv (taken), or torch for one of these reasons.
enum class Outcome : int8_t { taken, elsewhere, no_flash, nested, dtype, refused, count };

// Any thread may call it at any time.
void count(Function function, Outcome outcome);

// What can be said of either by its query: taken, or why torch computes it.
Outcome outcome_of(const at::Tensor& query);

}  // namespace qkv::replace
