// Dispatch key Autograd: attention_weights and its gradients.
#include <torch/library.h>

#include "derivatives.h"
#include "ops.h"

namespace qkv {
namespace {

using namespace autograd;

struct WeightsOp {
  static constexpr const char* kName = "AttentionWeightsBackward";

  static variable_list backward(const variable_list& grads, const Context& c) {
    if (!grads[0].defined()) return variable_list(kDifferentiable);
    Forward call = c.forward("attention_weights");
    call.has_value = false;
    return list_of(ops::weights_backward(
        {grads[0], {call, static_cast<Reduce>(c.variant)}, c.results[0], c.output_mask}));
  }
};

OutputAndLse weights_autograd(c10::DispatchKeySet keys, const Weights& call) {
  const auto node = prepare<WeightsOp>(call.forward, static_cast<int64_t>(call.reduce));
  OutputAndLse results = [&] {
    at::AutoDispatchBelowADInplaceOrView guard;
    return ops::weights_forward(keys & c10::after_autograd_keyset, call);
  }();
  if (node) {
    torch::autograd::set_history(std::get<0>(results), node);
    node->save_result(0, std::get<1>(results));
  }
  return results;
}

Gradients weights_backward_autograd(c10::DispatchKeySet keys, const WeightsBackward& call) {
  return refuse_second(
      "weights_backward", call.weights.forward, {&call.grad_weights, &call.lse},
      [&] { return ops::weights_backward(keys & c10::after_autograd_keyset, call); });
}

}  // namespace

TORCH_LIBRARY_IMPL(qkv, Autograd, m) {
  using ops::Adapter;
  m.impl("weights_forward", Adapter<&ops::weights_args, &weights_autograd>::with_keys);
  m.impl("weights_backward",
         Adapter<&ops::weights_backward_args, &weights_backward_autograd>::with_keys);
}

}  // namespace qkv
