// What qkv::rotate is made of.
#pragma once

#include "autograd/define.h"
#include "call/check.h"

namespace qkv::ops {

// Throws c10::Error for a call that cannot be computed.
template <class T>
void check_rotation(const Call& call);

// What the backward operator returns, to be filled; undefined: not wanted. The gradient of what was
// rotated without a norm lies in memory like the incoming one: a Node keeps its shape alone.
template <class T>
Tensors rotation_gradients(const Call& call);

Tensors rotate_cpu(const Call& call);
Tensors rotate_backward_cpu(const Call& call);
// x [batch..., H, L, D] rotated, in memory of its own, by rows of cos and sin [places, R / 2]:
// those of batch item b begin at row offsets[b]. They must have as many.
at::Tensor rotated_from(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin,
                        bool interleaved, c10::ArrayRef<int64_t> offsets);
// The same of torch's operators.
Tensors rotate_composition(const Call& call);

}  // namespace qkv::ops
