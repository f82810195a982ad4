// The derivatives of attention_backward and of attention_forward_jvp (docs/derivatives.md).
#pragma once

#include "call/call.h"

namespace qkv::ops {

// Dispatch keys CPU and Meta of attention_double_backward: the gradient of
// <tangents, what attention_backward returns>. output_tangent and logsumexp_tangent are what
// attention_forward_jvp returns for the same tangents; they are computed where they are not given.
Tensors attention_double_backward_cpu(const Call& call);
Tensors attention_double_backward_meta(const Call& call);

// attention_backward in forward mode (Operator::jvp).
Tensors attention_backward_jvp(const Call& call);
// The gradient of what attention_forward_jvp returns, by the other operators.
Tensors attention_jvp_backward(const Call& call);

}  // namespace qkv::ops
