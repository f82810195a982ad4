// The results of the operators, allocated: the same sizes and strides for the
// CPU kernels (T = int64_t) and the Meta kernels (T = SymInt).
#pragma once

#include "check.h"

namespace qkv {

// output: laid out in memory like query, but with the last dimension
// innermost. lse: contiguous, in the compute type; undefined without wants_lse.
template <class T>
OutputAndLse empty_results(const Forward& call, const Sizes<T>& sizes, bool wants_lse = true);

// A gradient, laid out like its tensor: with the same strides if that has no gaps
// and no overlap, else dense in the same order.
template <class T>
at::Tensor empty_gradient(const at::Tensor& tensor);

// The same, zero, for a kernel that adds to it: in the compute type.
at::Tensor zero_gradient(const at::Tensor& tensor);

}  // namespace qkv
