// The kernel library's backward pass for a call, of first and second derivatives.
#pragma once

#include "tensors/gradients.h"

namespace qkv::ops {

// Document by document where the call is packed. `problem` and `args` are bound, and the strides
// set; the gradients become 0 where there is nothing to attend to.
void run_backward(const Call& call, const Sizes<int64_t>& sizes, const Problem& problem,
                  const BackwardArgs& args, const GradientTensors& gradients);

}  // namespace qkv::ops
