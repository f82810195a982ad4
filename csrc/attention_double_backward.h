// Second derivatives, a part of the public interface (attention.h): how the gradients of a backward
// pass change when the inputs change along given directions, grad_output and grad_lse staying as
// they are. That is the same as the gradient, with respect to the inputs, of
//
//   sum grad_output * output' + sum grad_lse * lse'
//
// where output' and lse' are the derivatives along these directions (attention_jvp.h): so this is
// the second derivative of attention in reverse mode, too, the backward pass of attention_jvp, and
// forward mode of attention_backward. docs/derivatives.md has the formulas.
#pragma once

#include "attention_jvp.h"

namespace qkv {

// With BackwardArgs::direction, attention_backward makes these changes instead of the gradients. It
// takes O(L) memory, as without, and widens half precision to f32 in every product. A direction of
// a hidden key or value reaches nothing. There is no grad_weights.
struct BackwardDirection {
  JvpArgs along;  // its output is not used
  // JvpResult::output_jvp and lse_jvp, as attention_jvp left them for the same inputs.
  Input output_jvp, lse_jvp;
};

}  // namespace qkv
