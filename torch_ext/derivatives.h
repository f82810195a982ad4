// The steps that the operators' Autograd kernels share.
#pragma once

#include <torch/csrc/autograd/functions/basic_ops.h>

#include "check.h"
#include "node.h"

namespace qkv::autograd {

inline bool needs_node(TensorList tensors) {
  if (!at::GradMode::is_enabled()) return false;
  return std::any_of(tensors.begin(), tensors.end(), [](auto* t) { return t->requires_grad(); });
}

inline bool has_tangent(const at::Tensor& tensor) {
  return tensor.defined() && tensor._fw_grad(/*level=*/0).defined();
}

// Without this, forward-mode derivatives would come out as zero.
inline void refuse_tangents(const char* op, TensorList tensors) {
  for (const at::Tensor* tensor : tensors)
    TORCH_CHECK_NOT_IMPLEMENTED(!has_tangent(*tensor), op,
                                ": forward-mode derivatives (jvp) are not implemented yet");
}

// The kernels check the call; but tensors made in Python (FakeTensor, jagged) have errors of their
// own before that.
inline void check_python_tensors(const Forward& call) {
  c10::DispatchKeySet keys;
  for (const at::Tensor* tensor : call.tensors) keys = keys | tensor->key_set();
  if (!keys.has(c10::DispatchKey::Python)) return;
  check_tensors(call);
  check_supported(call);
}

// For what has no gradient. Without this, its results would look like constants.
inline void refuse_gradients(const char* op, TensorList tensors, c10::ArrayRef<const char*> names,
                             const char* instead) {
  if (!at::GradMode::is_enabled()) return;
  for (size_t i = 0; i < tensors.size(); ++i)
    TORCH_CHECK(!tensors[i]->defined() || !tensors[i]->requires_grad(), op, ": ", names[i],
                " requires grad, but this is for inference only, it has no gradient; ", instead);
}

// What comes before the forward pass: the Node, null if nothing requires grad.
template <class Op>
c10::intrusive_ptr<OpNode<Op>> prepare(const Forward& call, int64_t variant,
                                       const DifferentiableTensors& tensors) {
  check_python_tensors(call);
  refuse_tangents(call.op, call.tensors);
  if (!needs_node(tensors)) return {};
  return c10::make_intrusive<OpNode<Op>>(call, variant, tensors);
}

template <class Op>
c10::intrusive_ptr<OpNode<Op>> prepare(const Forward& call, int64_t variant = 0) {
  return prepare<Op>(call, variant, differentiable(call));
}

// compute(), a first derivative by the operator `op` of `call` and `more` tensors. Asking for a
// derivative of its results is an error; only asking is: torch.func.grad builds the graph for
// second derivatives whether they are needed or not.
inline Gradients refuse_second(const char* op, const Forward& call, TensorList more,
                               c10::function_ref<Gradients()> compute) {
  c10::SmallVector<const at::Tensor*, kArguments + 4> tensors(call.tensors.begin(),
                                                              call.tensors.end());
  tensors.append(more.begin(), more.end());
  refuse_tangents(op, tensors);
  c10::intrusive_ptr<torch::autograd::Node> node;
  if (needs_node(tensors)) {
    node = c10::make_intrusive<torch::autograd::Error>(
        std::string(op) + ": second derivatives are not implemented yet", edges_of(tensors));
  }
  Gradients gradients = [&] {
    at::AutoDispatchBelowADInplaceOrView guard;
    return compute();
  }();
  if (node)
    std::apply([&](auto&... gradient) { (torch::autograd::set_history(gradient, node), ...); },
               gradients);
  return gradients;
}

}  // namespace qkv::autograd
