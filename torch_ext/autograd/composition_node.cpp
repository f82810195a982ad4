#include "autograd/composition_node.h"

#include <torch/csrc/autograd/functions/utils.h>

#include "autograd/compose.h"

namespace qkv::autograd {
namespace {

using torch::autograd::variable_list;

// A backward operator is a function of what the forward pass was called with and of the incoming
// gradients. What the forward pass returned follows from that, so it gets no gradient of its own.
bool depends(const Call& call, const Parameter& p) {
  return p.is_tensor && call.has(Argument(p.which)) && call[Argument(p.which)].requires_grad() &&
         may_have_gradient(p.which);
}

}  // namespace

c10::intrusive_ptr<CompositionNode> CompositionNode::of(const Call& call) {
  for (const Parameter& p : call.op->parameters)
    if (depends(call, p)) return c10::make_intrusive<CompositionNode>(call);
  return {};
}

CompositionNode::CompositionNode(const Call& call)
    : op_(*call.op), options_(call.options), output_mask_(call.output_mask) {
  torch::autograd::edge_list edges;
  for (const Parameter& p : op_.parameters) {
    if (!p.is_tensor) continue;
    const at::Tensor& tensor = call[Argument(p.which)];
    edges.push_back(depends(call, p) ? torch::autograd::impl::gradient_edge(tensor)
                                     : torch::autograd::Edge());
    saved_.emplace_back(tensor, /*is_output=*/false);
  }
  set_next_edges(std::move(edges));
}

std::string CompositionNode::name() const { return op_.name + "_composition"; }

variable_list CompositionNode::apply(variable_list&& grads) {
  std::lock_guard<std::mutex> lock(mutex_);
  Call call(op_);
  call.options = options_;
  call.output_mask = output_mask_;
  variable_list tensors(saved_.size()), gradients(saved_.size());
  ArgumentSet wanted;
  size_t i = 0;
  for (const Parameter& p : op_.parameters) {
    if (!p.is_tensor) continue;
    tensors[i] = saved_[i].unpack();
    call.set(Argument(p.which), tensors[i]);
    wanted.set(Argument(p.which), task_should_compute_output(i++));
  }
  const ArgumentGradients found = composed_gradients(call, wanted, grads);
  i = 0;
  for (const Parameter& p : op_.parameters)
    if (p.is_tensor) gradients[i++] = found[p.which];
  return gradients;
}

void CompositionNode::release_variables() {
  std::lock_guard<std::mutex> lock(mutex_);
  for (auto& saved : saved_) saved.reset_data();
}

}  // namespace qkv::autograd
