// Dispatch key Autograd: attention and its gradients.
#include <torch/library.h>

#include "derivatives.h"
#include "ops.h"

namespace qkv {
namespace {

using namespace autograd;

struct AttentionOp {
  static constexpr const char* kName = "AttentionBackward";

  static variable_list backward(const variable_list& grads, const Context& c) {
    if (!grads[0].defined() && !grads[1].defined()) return variable_list(kDifferentiable);
    return list_of(ops::attention_backward(
        {grads[0], grads[1], c.forward("attention"), c.results[0], c.results[1], c.output_mask}));
  }
};

OutputAndLse forward_autograd(c10::DispatchKeySet keys, const Forward& call) {
  const auto node = prepare<AttentionOp>(call);
  OutputAndLse results = [&] {
    at::AutoDispatchBelowADInplaceOrView guard;
    return ops::attention_forward(keys & c10::after_autograd_keyset, call);
  }();
  if (node) {
    auto& [output, lse] = results;
    torch::autograd::set_history(output, node);
    torch::autograd::set_history(lse, node);
    node->save_result(0, output);
    node->save_result(1, lse);
  }
  return results;
}

Gradients backward_autograd(c10::DispatchKeySet keys, const Backward& call) {
  return refuse_second("attention_backward", call.forward,
                       {&call.grad_output, &call.grad_lse, &call.output, &call.lse}, [&] {
                         return ops::attention_backward(keys & c10::after_autograd_keyset, call);
                       });
}

}  // namespace

TORCH_LIBRARY_IMPL(qkv, Autograd, m) {
  using ops::Adapter;
  // Nothing to differentiate: an integer.
  m.impl("dropout_seed", torch::CppFunction::makeFallthrough());
  m.impl("attention_forward", Adapter<&ops::forward_args, &forward_autograd>::with_keys);
  m.impl("attention_backward", Adapter<&ops::backward_args, &backward_autograd>::with_keys);
}

}  // namespace qkv
