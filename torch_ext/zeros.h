// Tensors of zeros that a kernel adds to: gradients of masks, attention weights.
#pragma once

#include <ATen/core/Tensor.h>

namespace qkv {

// On the CPU; the strides leave no gaps. Large ones are fresh memory of the operating system,
// which is zero without being written, in huge pages where it grants them: to
// write 32 MiB of small pages takes 8 ms before the kernel has begun.
at::Tensor zeros(at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType dtype);

}  // namespace qkv
