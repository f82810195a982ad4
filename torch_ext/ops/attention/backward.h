// The kernel library's backward pass for a call, of first and second derivatives.
#pragma once

#include "tensors/gradients.h"

namespace qkv::ops {

// `problem` and `args` are bound, and the strides set; the gradients become 0 where there is
// nothing to attend to. The problem gets the documents of the call whose gradients these are.
void run_backward(Problem& problem, const BackwardArgs& args, const GradientTensors& gradients);

}  // namespace qkv::ops
