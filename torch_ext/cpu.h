// The CPU kernels of cpu_attention.cpp as C++ functions, for other kernels and for direct.h.
#pragma once

#include "call.h"

namespace qkv::cpu {

// Without wants_lse there is no logsumexp: undefined, and not computed.
OutputAndLse attention_forward(const Forward& call, bool wants_lse);
Gradients attention_backward(const Backward& call);

}  // namespace qkv::cpu
