// The rotation of qkv::rotate, for caches.
#pragma once

#include "autograd/define.h"
#include "call/check.h"

namespace qkv::ops {

// x [batch..., H, L, D] rotated, in memory of its own, by rows of cos and sin [places, R / 2]:
// those of batch item b begin at row offsets[b]. They must have as many.
at::Tensor rotated_from(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin,
                        bool interleaved, c10::ArrayRef<int64_t> offsets);

}  // namespace qkv::ops
