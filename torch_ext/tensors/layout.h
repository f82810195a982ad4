// The results of the operators, allocated: the same sizes and strides for the
// CPU kernels (T = int64_t) and the Meta kernels (T = SymInt).
#pragma once

#include "call/check.h"

namespace qkv {

// A result, or the tangent of one. The output is laid out in memory like query, but with the last
// dimension innermost; all others are contiguous.
template <class T>
at::Tensor empty_result(const Call& call, const Sizes<T>& sizes, Argument result);

// What a forward operator returns; undefined: a log-sum-exp that the call does not want.
template <class T>
Tensors empty_results(const Call& call, const Sizes<T>& sizes);

// The Meta kernel: the results of a forward operator, or the gradients that a backward operator
// returns.
Tensors empty_results_meta(const Call& call);

// A gradient, laid out like its tensor: with the same strides if that has no gaps
// and no overlap, else dense in the same order.
template <class T>
at::Tensor empty_gradient(const at::Tensor& tensor);

// What a backward operator returns; undefined: what is not wanted, and all if none is given.
template <class T>
Tensors empty_gradients(const Call& call);

// A gradient, zero, for a kernel that adds to it.
at::Tensor zero_gradient(const at::Tensor& tensor, at::ScalarType dtype);

}  // namespace qkv
