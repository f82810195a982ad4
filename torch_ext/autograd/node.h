// The Node of every operator that has a backward operator. A C++ Node, as torch's generated code
// has them: unlike torch::autograd::Function it works under torch.func and compiled autograd.
#pragma once

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/saved_variable.h>

#include "call/call.h"

namespace qkv::autograd {

// What goes into the backward operator besides the incoming gradients. `saved` has a tensor for
// each of its tensors that is no gradient, in their order; undefined: None.
struct BackwardInputs {
  c10::SmallVector<at::Tensor, 16> saved;
  Options options;
  ArgumentSet output_mask;
};

class OperatorNode : public torch::autograd::TraceableFunction {
 public:
  // Null if no argument that the results depend on requires grad.
  static c10::intrusive_ptr<OperatorNode> of(const Call& call);
  explicit OperatorNode(const Call& call);

  // Makes the results that have gradients parts of the graph, and saves those that the backward
  // operator takes.
  void set_results(const Tensors& results);

  std::string name() const override;
  torch::autograd::variable_list apply(torch::autograd::variable_list&& grads) override;
  void release_variables() override;
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs& args) const override;
  torch::autograd::variable_list apply_with_saved(
      const torch::autograd::variable_list& grads,
      torch::dynamo::autograd::SwapSavedVariables& saved) override;

 private:
  BackwardInputs inputs();
  const std::string& compiled_function(PyObject* compiler) const;

  const Operator &forward_, &backward_;
  Options options_;
  std::vector<torch::autograd::SavedVariable> saved_;
};

}  // namespace qkv::autograd
