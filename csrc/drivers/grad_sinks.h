// The gradient of the sinks. It needs no key: what the backward pass has of each row is enough.
#pragma once

#include "attention.h"

namespace qkv {

// Computes args.grad_by_head[kSinks][batch, head], one double, from the rows of that head.
void grad_sink(const Problem& problem, const BackwardArgs& args, int64_t batch, int64_t head);

}  // namespace qkv
