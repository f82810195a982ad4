// Dispatch key CompositeExplicitAutograd: backends without a kernel. An error,
// clearer than the dispatcher's. Nested tensors have keys of their own.
#include <torch/library.h>

#include "check.h"

namespace qkv {
namespace {

OutputAndLse forward_other(const Forward& call) {
  check_tensors(call);
  check_supported(call);
  TORCH_CHECK_NOT_IMPLEMENTED(false, "attention_with_lse: query is not a plain dense CPU tensor");
}

Gradients backward_other(const Backward& call) {
  check_tensors(call);
  check_supported(call.forward);
  TORCH_CHECK_NOT_IMPLEMENTED(false, "attention_backward: query is not a plain dense CPU tensor");
}

void refuse_all(torch::Library& m) {
  m.impl("attention_with_lse", ops::forward<&forward_other>);
  m.impl("attention_backward", ops::backward<&backward_other>);
}

}  // namespace

TORCH_LIBRARY_IMPL(qkv, CompositeExplicitAutograd, m) { refuse_all(m); }
TORCH_LIBRARY_IMPL(qkv, NestedTensorCPU, m) { refuse_all(m); }
TORCH_LIBRARY_IMPL(qkv, NestedTensorCUDA, m) { refuse_all(m); }

}  // namespace qkv
