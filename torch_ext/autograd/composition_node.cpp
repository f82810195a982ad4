#include "autograd/composition_node.h"

#include <ATen/ops/alias.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/functions/utils.h>

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
  const bool create_graph = at::GradMode::is_enabled();
  at::AutoGradMode grad_mode(true);
  variable_list tensors(saved_.size()), wanted, results, grads_of_results;
  for (size_t i = 0; i < saved_.size(); ++i) {
    tensors[i] = saved_[i].unpack();
    if (!task_should_compute_output(i)) continue;
    // An alias, so that the derivative with respect to one argument leaves out what the others owe
    // to the same tensor.
    tensors[i] = at::alias(tensors[i]);
    // Of a torch.func transform that has ended, the tensor is there and its place in the graph not.
    if (!tensors[i].requires_grad()) tensors[i].requires_grad_(true);
    wanted.push_back(tensors[i]);
  }
  Call call(op_);
  call.options = options_;
  call.output_mask = output_mask_;
  auto tensor = tensors.begin();
  for (const Parameter& p : op_.parameters)
    if (p.is_tensor) call.set(Argument(p.which), *tensor++);
  const Tensors computed = op_.kernels.composition(call);
  for (size_t i = 0; i < computed.size(); ++i) {
    if (!grads[i].defined() || !computed[i].defined() || !computed[i].requires_grad()) continue;
    results.push_back(computed[i]);
    grads_of_results.push_back(grads[i]);
  }
  variable_list gradients(saved_.size());
  if (results.empty() || wanted.empty()) return gradients;
  const variable_list found =
      torch::autograd::grad(results, wanted, grads_of_results, /*retain_graph=*/std::nullopt,
                            create_graph, /*allow_unused=*/true);
  auto next = found.begin();
  for (size_t i = 0; i < gradients.size(); ++i)
    if (task_should_compute_output(i)) gradients[i] = *next++;
  return gradients;
}

void CompositionNode::release_variables() {
  std::lock_guard<std::mutex> lock(mutex_);
  for (auto& saved : saved_) saved.reset_data();
}

}  // namespace qkv::autograd
