// Dispatch key Autograd, for all operators: what differentiates them follows from their signatures.
#pragma once

#include <c10/util/FunctionRef.h>

#include "call/boxed.h"

namespace qkv::autograd {

// The results of compute(whether a Node will want all of them), the operator itself below autograd,
// as parts of the graph if something requires grad. An operator without a backward operator gets a
// Node of its composition, or one that throws: it costs nothing, and only to ask for its derivative
// is an error, as torch.func.grad builds the graph of second derivatives whether they are needed or
// not. A call with forward-mode tangents is one of OperatorKernels::jvp, or its composition, or an
// error.
Tensors differentiate(const Call& call, c10::function_ref<Tensors(bool)> compute);

// Throws where a tensor of the call requires grad and gradients are recorded, if the operator says
// that it has none (OperatorKernels::no_gradient): its results would look like constants.
void refuse_gradients(const Call& call);

// The kernel.
void kernel(const Operator& op, c10::DispatchKeySet keys, boxed::Stack& stack);

}  // namespace qkv::autograd
