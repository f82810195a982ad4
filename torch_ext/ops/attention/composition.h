// Attention, composed of torch's operators: what gives the derivatives of orders for which there
// are no kernels (autograd/compose.h). It needs the memory of a few [..., H, L, S] tensors.
#pragma once

#include "call/call.h"

namespace qkv::ops {

// Whether the call is neither one of packed documents nor a part of a larger one.
bool composes_attention(const Call& call);

// What attention_forward returns, and the operators with the weights.
Tensors attention_composition(const Call& call);

}  // namespace qkv::ops
