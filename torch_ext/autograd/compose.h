// Operators and their derivatives out of torch's operators: what gives the derivatives of orders
// for which there are no kernels. It needs a function of the forward operator alone
// (OperatorKernels::composition), which torch differentiates as often as it takes.
#pragma once

#include "call/call.h"

namespace qkv::autograd {

// Whether there is a composition of this call: of its operator or, for a backward operator, of what
// that is a derivative of. Packed documents, and parts of a larger call, have none.
bool has_composition(const Call& call);

// The results of such a call, which can be differentiated any number of times and have tangents if
// its arguments have.
Tensors compose(const Call& call);

// For the composition of an operator that is `primal` in forward mode: the results of `primal`, and
// their tangents in the direction that the tangents of its arguments are (tangent_of).
Tensors compose_jvp(const Call& call, const Operator& primal);

// The gradients of the composed results of `call` with respect to the arguments `wanted`, if the
// results have the gradients `grads`; undefined: none.
Gradients composed_gradients(Call call, ArgumentSet wanted, c10::ArrayRef<at::Tensor> grads);

}  // namespace qkv::autograd
