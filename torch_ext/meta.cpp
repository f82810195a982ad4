// Dispatch key Meta: shapes, dtypes and strides only, for torch.compile and
// meta tensors.
#include <ATen/ops/empty.h>
#include <c10/core/SymInt.h>
#include <torch/library.h>

#include "layout.h"
#include "ops.h"

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
    return has_gradient(call, wanted, argument) ? empty_gradient<c10::SymInt>(call[argument])
                                                : at::Tensor();
  };
  return {gradient(kQuery),    gradient(kKey),         gradient(kValue),
          gradient(kAttnMask), gradient(kAlibiSlopes), gradient(kSinks)};
}

Gradients backward_meta(const Backward& call) {
  check<c10::SymInt>(call);
  if (!call.grad_output.defined() && !call.grad_lse.defined()) return {};
  return gradients_meta(call.forward, call.output_mask);
}

OutputAndLse weights_meta(const Weights& call) {
  const auto sizes = check<c10::SymInt>(call.forward);
  const at::TensorOptions options = call.forward.query().options();
  const at::ScalarType lse_type = compute_type(call.forward.query().scalar_type());
  return {at::empty_symint(sizes.weights(call.reduce), options),
          at::empty_symint(sizes.lse(), options.dtype(lse_type))};
}

Gradients weights_backward_meta(const WeightsBackward& call) {
  check<c10::SymInt>(call);
  return gradients_meta(call.weights.forward, call.output_mask);
}

OutputAndIndex hard_meta(const Hard& call) {
  const auto sizes = check<c10::SymInt>(call.forward);
  return {std::get<0>(empty_results(call.forward, sizes)),
          at::empty_symint(sizes.lse(), call.forward.query().options().dtype(at::kLong))};
}

Gradients hard_backward_meta(const HardBackward& call) {
  check<c10::SymInt>(call);
  return gradients_meta(call.hard.forward, wanted_of(call));
}

}  // namespace

TORCH_LIBRARY_IMPL(qkv, Meta, m) {
  using ops::Adapter;
  m.impl("dropout_seed", &dropout_seed_meta);
  m.impl("attention_forward", Adapter<&ops::forward_args, &forward_meta>::call);
  m.impl("attention_backward", Adapter<&ops::backward_args, &backward_meta>::call);
  m.impl("weights_forward", Adapter<&ops::weights_args, &weights_meta>::call);
  m.impl("weights_backward", Adapter<&ops::weights_backward_args, &weights_backward_meta>::call);
  m.impl("hard_forward", Adapter<&ops::hard_args, &hard_meta>::call);
  m.impl("hard_backward", Adapter<&ops::hard_backward_args, &hard_backward_meta>::call);
}

}  // namespace qkv
