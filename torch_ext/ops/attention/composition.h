// Attention and its gradients, composed of torch's operators: the derivatives that have no kernels
// yet (autograd/composition_node.h). They need the memory of a few [..., H, L, S] tensors.
#pragma once

#include "call/call.h"

namespace qkv::ops {

// Whether the call has nothing but scaled_dot_product_attention's arguments, and bias.
bool composes_attention(const Call& call);

// What attention_forward, attention_forward_jvp and attention_backward return, and those with the
// weights.
Tensors attention_forward_composition(const Call& call);
Tensors attention_jvp_composition(const Call& call);
Tensors attention_backward_composition(const Call& call);

}  // namespace qkv::ops
