// Dispatch key Autograd: hard_attention and its gradients.
#include <torch/library.h>

#include "derivatives.h"
#include "ops.h"

namespace qkv {
namespace {

using namespace autograd;

struct HardOp {
  static constexpr const char* kName = "HardAttentionBackward";

  static variable_list backward(const variable_list& grads, const Context& c) {
    if (!grads[0].defined()) return variable_list(kDifferentiable);
    return list_of(ops::hard_backward(
        {grads[0], {c.forward("hard_attention"), c.variant != 0}, c.results[0], c.output_mask}));
  }
};

// Which key is best does not change with a small step of query or key: only value has a gradient.
DifferentiableTensors differentiable_of(const Hard& call) {
  DifferentiableTensors tensors = differentiable(call.forward);
  if (call.straight_through) return tensors;
  for (int i = 0; i < kDifferentiable; ++i)
    if (i != kValue) tensors[i] = &kNone;
  return tensors;
}

OutputAndIndex hard_autograd(c10::DispatchKeySet keys, const Hard& call) {
  const auto node = prepare<HardOp>(call.forward, call.straight_through, differentiable_of(call));
  OutputAndIndex results = [&] {
    at::AutoDispatchBelowADInplaceOrView guard;
    return ops::hard_forward(keys & c10::after_autograd_keyset, call);
  }();
  if (node) {
    torch::autograd::set_history(std::get<0>(results), node);
    node->save_result(0, std::get<1>(results));
  }
  return results;
}

Gradients hard_backward_autograd(c10::DispatchKeySet keys, const HardBackward& call) {
  return refuse_second("hard_backward", call.hard.forward, {&call.grad_output, &call.index},
                       [&] { return ops::hard_backward(keys & c10::after_autograd_keyset, call); });
}

}  // namespace

TORCH_LIBRARY_IMPL(qkv, Autograd, m) {
  using ops::Adapter;
  m.impl("hard_forward", Adapter<&ops::hard_args, &hard_autograd>::with_keys);
  m.impl("hard_backward", Adapter<&ops::hard_backward_args, &hard_backward_autograd>::with_keys);
}

}  // namespace qkv
