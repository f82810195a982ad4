// Calls of operators by one another and by the C++ functions.
#pragma once

#include <functional>
#include <initializer_list>

#include "call/call.h"

namespace qkv {

// Whether all tensors are plain dense ones on the CPU whose numbers can be read: none under
// torch.func, a Python mode (TorchDispatchMode, FakeTensorMode, compilation) or a tracer. Or
// whether tensors that have these keys are.
bool is_plain(const Call& call);
bool is_plain(c10::DispatchKeySet keys);
// Whether those of these tensors that are defined are plain, and nobody can ask for a derivative
// with respect to any: autograd may be left out then.
bool are_constant(std::initializer_list<std::reference_wrapper<const at::Tensor>> tensors);

// The CPU kernel's results, of aligned tensors (tensors/copies.h). The kernel library, which knows
// no torch, throws std::bad_alloc where it gets no memory; that is an error here, with the sizes
// that it follows from.
Tensors run_cpu(const Call& call);

// What the dispatcher returns. Where it would do no more than run the Autograd kernel, if that, and
// the CPU kernel, they are run without it: to send the arguments of attention through it takes as
// long as the attention of a small call. Direct calls leave logsumexp out where call.wants_lse says
// so and no Node needs it; it is undefined then.
Tensors run(const Call& call);

// The same under autocast (call/autocast.h), which casts these arguments.
Tensors run_cast(Call&& call, std::initializer_list<Argument> arguments = {
                                  arg::query, arg::key, arg::value, arg::attn_mask});

}  // namespace qkv
