// What qkv::rotate is made of.
#pragma once

#include "autograd/define.h"
#include "call/check.h"

namespace qkv::ops {

// Throws c10::Error for a call that cannot be computed.
template <class T>
void check_rotation(const Call& call);

Tensors rotate_cpu(const Call& call);
Tensors rotate_backward_cpu(const Call& call);
// The same of torch's operators.
Tensors rotate_composition(const Call& call);

}  // namespace qkv::ops
