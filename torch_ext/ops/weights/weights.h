// qkv::attention_weights, qkv::attention_with_weights and the operators they are made of. The
// second has what the first has, and the output beside the weights, from one pass.
#pragma once

#include "autograd/define.h"
#include "call/call.h"

namespace qkv::ops {

extern DefinedOperator weights_forward, with_weights_forward;

// Without a value there is no output, and no gradient of a value.
Tensors weights_forward_cpu(const Call& call);
Tensors weights_backward_cpu(const Call& call);

}  // namespace qkv::ops
