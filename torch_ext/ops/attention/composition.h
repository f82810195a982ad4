// Attention and its derivatives, composed of torch's operators: what gives the derivatives of
// orders for which there are no kernels (autograd/composition_node.h). They need the memory of a
// few [..., H, L, S] tensors.
#pragma once

#include "call/call.h"

namespace qkv::ops {

// Whether the call is neither one of packed documents nor a part of a larger one.
bool composes_attention(const Call& call);

// What attention_forward, attention_forward_jvp, attention_backward and attention_double_backward
// return, and those with the weights.
Tensors attention_forward_composition(const Call& call);
Tensors attention_jvp_composition(const Call& call);
Tensors attention_backward_composition(const Call& call);
Tensors attention_double_backward_composition(const Call& call);

}  // namespace qkv::ops
