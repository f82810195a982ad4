// Dispatch key CompositeExplicitAutograd: backends without a kernel. An error,
// clearer than the dispatcher's. Nested tensors have keys of their own.
#include <torch/library.h>

#include "check.h"

namespace qkv {
namespace {

template <class Call>
void refuse(const char* op, const Call& call, const at::Tensor& query) {
  check_tensors(call);
  TORCH_CHECK_NOT_IMPLEMENTED(false, op, " runs on the CPU, but query is on ", query.device());
}

OutputAndLse forward_other(const Forward& call) {
  refuse("attention_with_lse", call, call.query);
  return {};
}

Gradients backward_other(const Backward& call) {
  refuse("attention_backward", call, call.forward.query);
  return {};
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
