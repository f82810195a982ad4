// Results too large for the allocator to keep: each call gets them from the
// operating system, and pays for every page when it is first touched. In huge
// pages, where the system grants them, 32 MiB take 3 ms instead of 8 to 20.
#pragma once

#include <ATen/core/Tensor.h>

namespace qkv {

// Asks for huge pages if `tensor`, not yet written, is that large; returns it.
at::Tensor in_huge_pages(at::Tensor tensor);

// Zeros, on the CPU, that a kernel adds to; the strides leave no gaps. Large ones
// are fresh memory, which is zero without being written.
at::Tensor zeros(at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType dtype);

}  // namespace qkv
