// Dispatch key Autograd: attention and its gradients. Also the direct calls, which go the same way.
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include "cpu.h"
#include "derivatives.h"
#include "direct.h"
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

// Where the dispatcher leaves Autograd kernels out: in inference mode, and within operators.
bool is_below_autograd() {
  return c10::impl::tls_is_dispatch_key_excluded(c10::DispatchKey::AutogradFunctionality);
}

// compute(whether logsumexp is wanted) is the forward pass itself.
template <class Compute>
OutputAndLse forward(const Forward& call, const Compute& compute) {
  const auto node = prepare<AttentionOp>(call);
  OutputAndLse results = [&] {
    at::AutoDispatchBelowADInplaceOrView guard;
    return compute(node != nullptr);
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

Gradients backward(const Backward& call, c10::function_ref<Gradients()> compute) {
  return refuse_second("attention_backward", call.forward,
                       {&call.grad_output, &call.grad_lse, &call.output, &call.lse}, compute);
}

OutputAndLse forward_autograd(c10::DispatchKeySet keys, const Forward& call) {
  return forward(
      call, [&](bool) { return ops::attention_forward(keys & c10::after_autograd_keyset, call); });
}

Gradients backward_autograd(c10::DispatchKeySet keys, const Backward& call) {
  return backward(call,
                  [&] { return ops::attention_backward(keys & c10::after_autograd_keyset, call); });
}

}  // namespace

OutputAndLse direct::attention_forward(const Forward& call, bool wants_lse) {
  const OneThreadAfterFork one_thread;
  if (is_below_autograd()) return cpu::attention_forward(call, wants_lse);
  return forward(
      call, [&](bool has_node) { return cpu::attention_forward(call, wants_lse || has_node); });
}

Gradients direct::attention_backward(const Backward& call) {
  const OneThreadAfterFork one_thread;
  if (is_below_autograd()) return cpu::attention_backward(call);
  return backward(call, [&] { return cpu::attention_backward(call); });
}

TORCH_LIBRARY_IMPL(qkv, Autograd, m) {
  using ops::Adapter;
  // Nothing to differentiate: an integer.
  m.impl("dropout_seed", torch::CppFunction::makeFallthrough());
  m.impl("attention_forward", Adapter<&ops::forward_args, &forward_autograd>::with_keys);
  m.impl("attention_backward", Adapter<&ops::backward_args, &backward_autograd>::with_keys);
}

}  // namespace qkv
