// qkv::hard_attention: the value at the best key.
#pragma once

#include "call/call.h"

namespace qkv::ops {

Tensors hard_forward_cpu(const Call& call);
Tensors hard_backward_cpu(const Call& call);

}  // namespace qkv::ops
