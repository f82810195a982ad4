// The Node of every call that can be differentiated. A C++ Node, as torch's generated code has
// them: unlike torch::autograd::Function it works under torch.func and compiled autograd.
#pragma once

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/saved_variable.h>

#include "call/call.h"

namespace qkv::autograd {

// It calls the backward operator. Where there is none, but a composition (compose.h), it saves the
// call; only when its derivative is asked for, it makes the call once more out of torch's operators
// and differentiates those, any number of times: third derivatives of attention, and second ones of
// its weights.
class OperatorNode : public torch::autograd::TraceableFunction {
 public:
  // Null if no argument that the results depend on requires grad.
  static c10::intrusive_ptr<OperatorNode> make(const Call& call);
  explicit OperatorNode(const Call& call);

  // Where there is a backward operator: makes the results that have gradients parts of the graph,
  // and saves those that it takes.
  void set_results(const Tensors& results);

  std::string name() const override;
  torch::autograd::variable_list apply(torch::autograd::variable_list&& grads) override;
  void release_variables() override;
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs& args) const override;
  torch::autograd::variable_list apply_with_saved(
      const torch::autograd::variable_list& grads,
      torch::dynamo::autograd::SwapSavedVariables& saved) override;

 private:
  // A tensor of op_, but for incoming gradients.
  struct Saved {
    Argument argument;
    int result;  // which of the results it is; -1: an argument of the call
    torch::autograd::SavedVariable variable;
  };

  bool is_composed() const { return &op_ == &forward_; }
  // The arguments whose gradients are asked for.
  ArgumentSet wanted();
  // The call of op_, without incoming gradients. `tensors` gets what it refers to.
  Call saved_call(c10::SmallVectorImpl<at::Tensor>& tensors);
  const std::string& compiled_function(PyObject* compiler) const;

  const Operator& forward_;
  const Operator& op_;  // the backward operator or, without one, forward_
  Options options_;
  ArgumentSet output_mask_;  // of a call that is composed
  std::vector<Saved> saved_;
};

}  // namespace qkv::autograd
