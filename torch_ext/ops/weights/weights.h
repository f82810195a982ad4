// qkv::attention_weights.
#pragma once

#include "call/call.h"

namespace qkv::ops {

extern Operator weights_forward;

Tensors weights_forward_cpu(const Call& call);
Tensors weights_backward_cpu(const Call& call);

}  // namespace qkv::ops
