#include "autograd/compose.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>

#include "autograd/run.h"
#include "compat/python_lock.h"

namespace qkv::autograd {
namespace {

using torch::autograd::variable_list;

// An alias of an argument, in its place, so that the derivative with respect to one argument leaves
// out what the others owe to the same tensor.
const at::Tensor& separate(Call& call, Argument argument, at::Tensor& alias) {
  alias = at::alias(call[argument]);
  // Of a torch.func transform that has ended, the tensor is there and its place in the graph not.
  // Under a vmap around it there is no place that could be made anew.
  TORCH_CHECK_NOT_IMPLEMENTED(
      alias.requires_grad() || !alias.key_set().has(c10::DispatchKey::FuncTorchBatched),
      call.title(),
      ": a derivative of this order is asked for under vmap when torch.func's grad or ",
      "vjp around it has ended; expected jacfwd or grad as the outer derivative, not vjp or "
      "jacrev");
  if (!alias.requires_grad()) alias.requires_grad_(true);
  call.set(argument, alias);
  return alias;
}

// Whether what is made of a call, and of gradients beside it, may have a place in a graph: within a
// transform of torch.func, or because one of these tensors has one, or a tangent.
bool is_recorded(const Call& call, c10::ArrayRef<at::Tensor> beside = {}) {
  const auto has_place = [](const at::Tensor& x) {
    return x.defined() && (at::alias(x).requires_grad() || x._fw_grad(0).defined());
  };
  return at::GradMode::is_enabled() &&
         (!is_plain(c10::DispatchKeySet()) ||
          std::any_of(call.tensors.begin(), call.tensors.end(),
                      [&](const at::Tensor* x) { return has_place(*x); }) ||
          std::any_of(beside.begin(), beside.end(), has_place));
}

// The derivative of `results`, where they have gradients, with respect to `inputs`; undefined:
// none.
variable_list derivative(c10::ArrayRef<at::Tensor> results, c10::ArrayRef<at::Tensor> grads,
                         const variable_list& inputs, bool create_graph) {
  variable_list outputs, of_outputs;
  for (size_t i = 0; i < results.size(); ++i) {
    if (!grads[i].defined() || !results[i].defined() || !results[i].requires_grad()) continue;
    outputs.push_back(results[i]);
    of_outputs.push_back(grads[i]);
  }
  if (outputs.empty() || inputs.empty()) return variable_list(inputs.size());
  const WithoutPythonLock no_lock;
  return torch::autograd::grad(outputs, inputs, of_outputs, /*retain_graph=*/std::nullopt,
                               create_graph, /*allow_unused=*/true);
}

}  // namespace

bool has_composition(const Call& call) {
  const Operator* op = call.op;
  while (op->is_backward) op = op->differentiated;
  return op->kernels.composition && !call.is_packed() && call.options.shard.is_whole();
}

// A backward operator returns the gradients of what `differentiated` does.
Tensors compose(const Call& call) {
  const Operator& op = *call.op;
  if (!op.is_backward) return op.kernels.composition(call);
  const Operator& forward = *op.differentiated;
  ArgumentSet wanted;
  for (const Argument result : op.results) wanted.set(result, call.wants_gradient(result));
  Call differentiated = call.as(forward);
  Tensors grads;
  for (const Argument result : forward.results) {
    const Argument incoming = forward.incoming_of(result);
    grads.push_back(incoming == arg::count ? at::Tensor() : call[incoming]);
    if (forward.is_backward) differentiated.output_mask.set(result, grads.back().defined());
  }
  const Gradients found = composed_gradients(differentiated, wanted, grads);
  Tensors results;
  for (const Argument result : op.results)
    results.push_back(found[result].defined() || !wanted[result] ? found[result]
                                                                 : at::zeros_like(call[result]));
  return results;
}

// The gradients of the arguments are linear in those of the results, and the derivative of this
// linear function, with the tangents for its gradients, is the tangents of the results.
Tensors compose_jvp(const Call& call, const Operator& primal) {
  Tensors results = compose(call.as(primal));
  const bool create_graph = is_recorded(call);
  at::AutoGradMode grad_mode(true);
  Call separated = call.as(primal);
  Gradients aliases;
  variable_list inputs, tangents, zeros;
  for (int i = 0; i < arg::kDifferentiable; ++i) {
    if (!call.has(tangent_of(Argument(i)))) continue;
    inputs.push_back(separate(separated, Argument(i), aliases[i]));
    tangents.push_back(call[tangent_of(Argument(i))]);
  }
  const Tensors composed = compose(separated);
  for (const at::Tensor& result : composed)
    zeros.push_back(at::zeros_like(result).requires_grad_(true));
  const variable_list gradients = derivative(composed, zeros, inputs, /*create_graph=*/true);
  const variable_list found = derivative(gradients, tangents, zeros, create_graph);
  for (size_t i = 0; i < found.size(); ++i)
    results.push_back(found[i].defined() ? found[i] : at::zeros_like(composed[i]));
  return results;
}

Gradients composed_gradients(Call call, ArgumentSet wanted, c10::ArrayRef<at::Tensor> grads) {
  const bool create_graph = is_recorded(call, grads);
  at::AutoGradMode grad_mode(true);
  Gradients aliases, gradients;
  variable_list inputs;
  for (int i = 0; i < arg::count; ++i)
    if (wanted[Argument(i)]) inputs.push_back(separate(call, Argument(i), aliases[i]));
  const variable_list found = derivative(compose(call), grads, inputs, create_graph);
  auto next = found.begin();
  for (int i = 0; i < arg::count; ++i)
    if (wanted[Argument(i)]) gradients[i] = *next++;
  return gradients;
}

}  // namespace qkv::autograd
