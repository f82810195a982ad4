// Dispatch key Meta: shapes, dtypes and strides only, for torch.compile and
// meta tensors.
#include <ATen/ops/empty.h>
#include <c10/core/SymInt.h>
#include <torch/library.h>

#include "layout.h"

namespace qkv {
namespace {

at::Tensor dropout_seed_meta(const at::Tensor& query) {
  return at::empty({1}, query.options().dtype(at::kLong));
}

OutputAndLse forward_meta(const Forward& call) {
  return empty_results(call, check<c10::SymInt>(call));
}

Gradients gradients_meta(const Forward& call, const OutputMask& wanted) {
  const auto gradient = [&](Argument argument) {
    const bool has = wanted[argument] && call[argument].defined();
    return has ? empty_gradient<c10::SymInt>(call[argument]) : at::Tensor();
  };
  return {gradient(kQuery),    gradient(kKey),         gradient(kValue),
          gradient(kAttnMask), gradient(kAlibiSlopes), gradient(kSinks)};
}

Gradients backward_meta(const Backward& call) {
  check<c10::SymInt>(call);
  if (!call.grad_output.defined() && !call.grad_lse.defined()) return {};
  return gradients_meta(call.forward, call.output_mask);
}

}  // namespace

TORCH_LIBRARY_IMPL(qkv, Meta, m) {
  using ops::Adapter;
  m.impl("dropout_seed", &dropout_seed_meta);
  m.impl("attention_forward", Adapter<&ops::forward_args, &forward_meta>::call);
  m.impl("attention_backward", Adapter<&ops::backward_args, &backward_meta>::call);
}

}  // namespace qkv
