// Calls without the dispatcher. To send the 16 arguments of attention_forward through it twice, to
// the Autograd and to the CPU kernel, takes as long as the attention of a small call.
#pragma once

#include "call.h"

namespace qkv::direct {

// Whether the dispatcher, given these tensors (undefined: None) on this thread, would do no more
// than run the Autograd kernel, if that, and the CPU kernel: not under torch.func, a Python mode
// (TorchDispatchMode, FakeTensorMode, compilation), a tracer or the profiler, and for no tensors
// but plain dense ones on the CPU.
bool is_possible(c10::ArrayRef<const at::Tensor*> tensors);

// What the dispatcher would return; without wants_lse, logsumexp may be undefined. Only where
// is_possible.
OutputAndLse attention_forward(const Forward& call, bool wants_lse);
Gradients attention_backward(const Backward& call);

}  // namespace qkv::direct
