// Dispatch key Meta: shapes, dtypes and strides only, for torch.compile and
// meta tensors.
#include <c10/core/SymInt.h>
#include <torch/library.h>

#include "layout.h"

namespace qkv {
namespace {

OutputAndLse forward_meta(const Forward& call) {
  return empty_results(call, check<c10::SymInt>(call));
}

Gradients backward_meta(const Backward& call) {
  check<c10::SymInt>(call);
  if (!call.grad_output && !call.grad_lse) return {};
  const auto gradient = [](bool wanted, const at::Tensor& tensor) {
    return wanted ? empty_gradient<c10::SymInt>(tensor) : at::Tensor();
  };
  const Forward& f = call.forward;
  return {gradient(call.output_mask[0], f.query), gradient(call.output_mask[1], f.key),
          gradient(call.output_mask[2], f.value)};
}

}  // namespace

TORCH_LIBRARY_IMPL(qkv, Meta, m) {
  m.impl("attention_with_lse", ops::forward<&forward_meta>);
  m.impl("attention_backward", ops::backward<&backward_meta>);
}

}  // namespace qkv
