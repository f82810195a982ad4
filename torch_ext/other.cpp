// Dispatch key CompositeExplicitAutograd: backends without a kernel. An error,
// clearer than the dispatcher's. Nested tensors have keys of their own.
#include <torch/library.h>

#include "check.h"
#include "ops.h"

namespace qkv {
namespace {

// The first check that fails says why; if none does, it is a kind of tensor that has no kernel.
template <class Call>
[[noreturn]] void refuse(const Call& call, const Forward& forward) {
  check_tensors(call);
  check_supported(forward);
  TORCH_CHECK_NOT_IMPLEMENTED(false, forward.op, ": query is not a plain dense CPU tensor");
}

at::Tensor dropout_seed_other(const at::Tensor& query) {
  TORCH_CHECK(query.defined(), "dropout_seed: query is an undefined tensor");
  TORCH_CHECK_NOT_IMPLEMENTED(false, "dropout_seed: query is on ", query.device(),
                              ", but a plain dense CPU tensor is expected");
}

OutputAndLse forward_other(const Forward& call) { refuse(call, call); }
Gradients backward_other(const Backward& call) { refuse(call, call.forward); }
OutputAndLse weights_other(const Weights& call) { refuse(call.forward, call.forward); }
Gradients weights_backward_other(const WeightsBackward& call) {
  refuse(call, call.weights.forward);
}
OutputAndIndex hard_other(const Hard& call) { refuse(call.forward, call.forward); }
Gradients hard_backward_other(const HardBackward& call) { refuse(call, call.hard.forward); }

void refuse_all(torch::Library& m) {
  using ops::Adapter;
  m.impl("dropout_seed", &dropout_seed_other);
  m.impl("attention_forward", Adapter<&ops::forward_args, &forward_other>::call);
  m.impl("attention_backward", Adapter<&ops::backward_args, &backward_other>::call);
  m.impl("weights_forward", Adapter<&ops::weights_args, &weights_other>::call);
  m.impl("weights_backward", Adapter<&ops::weights_backward_args, &weights_backward_other>::call);
  m.impl("hard_forward", Adapter<&ops::hard_args, &hard_other>::call);
  m.impl("hard_backward", Adapter<&ops::hard_backward_args, &hard_backward_other>::call);
}

}  // namespace

TORCH_LIBRARY_IMPL(qkv, CompositeExplicitAutograd, m) { refuse_all(m); }
TORCH_LIBRARY_IMPL(qkv, NestedTensorCPU, m) { refuse_all(m); }
TORCH_LIBRARY_IMPL(qkv, NestedTensorCUDA, m) { refuse_all(m); }

}  // namespace qkv
