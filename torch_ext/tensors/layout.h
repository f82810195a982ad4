// The results of the operators, allocated: the same sizes and strides for the
// CPU kernels (T = int64_t) and the Meta kernels (T = SymInt).
#pragma once

#include "call/check.h"

namespace qkv {

// The output: laid out in memory like query, but with the last dimension innermost.
template <class T>
at::Tensor empty_output(const Call& call, const Sizes<T>& sizes);

// A number for each row [..., H, L]: contiguous.
template <class T>
at::Tensor empty_rows(const Sizes<T>& sizes, at::ScalarType dtype);

// The output and, in the compute type, the log-sum-exp; undefined where the call does not want it.
template <class T>
Tensors empty_results(const Call& call, const Sizes<T>& sizes);

// A gradient, laid out like its tensor: with the same strides if that has no gaps
// and no overlap, else dense in the same order.
template <class T>
at::Tensor empty_gradient(const at::Tensor& tensor);

// Of every argument whose gradient a backward operator returns; for Meta kernels.
Tensors empty_gradients(const Call& call);

// A gradient, zero, for a kernel that adds to it: in the compute type.
at::Tensor zero_gradient(const at::Tensor& tensor);

}  // namespace qkv
