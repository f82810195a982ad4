// Whether tensors share memory: what is written must not be anywhere else, too.
#pragma once

#include <ATen/core/Tensor.h>

namespace qkv {

// Whether two elements of `tensor` are the same memory.
bool overlaps_itself(const at::Tensor& tensor);

// Whether an element of `a` and one of `b` share memory.
bool overlap(const at::Tensor& a, const at::Tensor& b);

// Whether `part` is the first numbers of every row of `whole`: the same memory, read less far; or
// neither is defined.
bool begins_rows(const at::Tensor& part, const at::Tensor& whole);

}  // namespace qkv
