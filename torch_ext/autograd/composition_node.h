// The Node of a call that has a composition (compose.h), of an operator without a backward
// operator: third derivatives of attention, and second ones of its weights.
#pragma once

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/saved_variable.h>

#include "call/call.h"

namespace qkv::autograd {

// It saves the call. Only when its derivative is asked for, it makes the call once more out of
// torch's operators and differentiates those, any number of times.
class CompositionNode : public torch::autograd::Node {
 public:
  // Null if nothing that the results depend on requires grad.
  static c10::intrusive_ptr<CompositionNode> of(const Call& call);
  explicit CompositionNode(const Call& call);

  std::string name() const override;
  torch::autograd::variable_list apply(torch::autograd::variable_list&& grads) override;
  void release_variables() override;

 private:
  const Operator& op_;
  Options options_;
  ArgumentSet output_mask_;
  std::vector<torch::autograd::SavedVariable> saved_;  // of each tensor parameter; None: undefined
};

}  // namespace qkv::autograd
