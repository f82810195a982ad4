// Forward mode: from a call whose tensors carry tangents to one that has them beside its arguments.
#pragma once

#include "call/call.h"

namespace qkv::autograd {

// What Kernels::jvp of `call`'s operator returns for it: the results, and then their tangents. The
// latter are parts of the graph like the results of any call, so that they can be differentiated
// backward.
Tensors run_jvp(const Call& call);

// Makes the second half of `jvp` the tangents of `results`, as far as it is defined.
void set_tangents(Tensors& results, const Tensors& jvp);

}  // namespace qkv::autograd
