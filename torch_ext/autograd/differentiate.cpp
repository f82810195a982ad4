#include "autograd/differentiate.h"

#include <torch/csrc/autograd/functions/basic_ops.h>
#include <torch/csrc/autograd/functions/utils.h>

#include <algorithm>

#include "autograd/compose.h"
#include "autograd/node.h"
#include "call/check.h"

namespace qkv::autograd {
namespace {

constexpr uint64_t kLevel = 0;  // torch has one; nested ones are torch.func's, a call for each

// The kernels check the call; but tensors made in Python (FakeTensor, jagged) have errors of their
// own before that.
void check_python_tensors(const Call& call) {
  c10::DispatchKeySet keys;
  call.op->for_each_tensor([&](Argument argument) { keys = keys | call[argument].key_set(); });
  if (!keys.has(c10::DispatchKey::Python)) return;
  check_tensors(call);
  check_supported(call);
}

bool carries_tangents(const Call& call) {
  bool found = false;
  call.op->for_each_tensor([&](Argument argument) {
    found = found || (call.has(argument) && call[argument]._fw_grad(kLevel).defined());
  });
  return found;
}

// The kernels of calls without tangents know none: with them, forward-mode derivatives would come
// out as zero.
Tensors compose_tangents(const Call& call) {
  TORCH_CHECK_NOT_IMPLEMENTED(has_composition(call),
                              call.op->is_backward ? call.op->name.c_str() : call.title(),
                              ": forward-mode derivatives (jvp) are not implemented yet");
  return compose(call);
}

constexpr const char* kOrders[] = {"derivatives", "second derivatives", "third derivatives"};

using NodePointer = c10::intrusive_ptr<torch::autograd::Node>;

NodePointer node_that_throws(const Call& call) {
  torch::autograd::edge_list edges;
  for (const at::Tensor* tensor : call.tensors)
    if (tensor->defined() && tensor->requires_grad())
      edges.push_back(torch::autograd::impl::gradient_edge(*tensor));
  if (edges.empty()) return {};
  return c10::make_intrusive<torch::autograd::Error>(
      c10::str(call.op->name, ": ",
               kOrders[std::min<size_t>(call.op->order, std::size(kOrders) - 1)],
               " are not implemented yet"),
      std::move(edges));
}

// Null if nothing that the results depend on requires grad, or gradients are not recorded.
NodePointer node_of(const Call& call) {
  if (!at::GradMode::is_enabled()) return {};
  if (call.op->backward || has_composition(call)) return OperatorNode::make(call);
  return node_that_throws(call);
}

// Makes the results of `op` parts of the graph, behind their Node; null: they are constants.
void set_history(const Operator& op, const NodePointer& node, const Tensors& results) {
  if (!node) return;
  if (op.backward) return static_cast<OperatorNode&>(*node).set_results(results);
  for (const at::Tensor& result : results) torch::autograd::set_history(result, node);
}

template <class Compute>
Tensors below_autograd(const Compute& compute, bool has_node) {
  at::AutoDispatchBelowADInplaceOrView guard;
  return compute(has_node);
}

// What OperatorKernels::jvp returns for a call whose tensors carry tangents: the results, and then
// their tangents. The latter are parts of the graph like the results of any call, so that they can
// be differentiated backward.
Tensors run_jvp(const Call& call) {
  Call with_tangents = call;
  with_tangents.wants_lse = true;
  std::array<at::Tensor, arg::count> primals, tangents;
  for (const Parameter& p : call.op->parameters) {
    const auto argument = Argument(p.which);
    if (!p.is_tensor || !call.has(argument)) continue;
    const at::Tensor& tangent = tangents[argument] = call[argument]._fw_grad(kLevel);
    if (!tangent.defined()) continue;
    with_tangents.set(argument, primals[argument] = call[argument]._fw_primal(kLevel));
    if (tangent_of(argument) != arg::count && !tangent._is_zerotensor())
      with_tangents.set(tangent_of(argument), tangent);
  }
  return call.op->kernels.jvp(with_tangents);
}

// By OperatorKernels::jvp. The results are computed once more, as in a call without tangents, if
// they require grad as well: the Node of such a call saves the arguments with their tangents, so
// that the backward pass has tangents, too. And if the tangents alone are batched by the vmap of
// torch's core, which gradcheck uses: then the results must not be.
Tensors differentiate_forward(const Call& call, c10::function_ref<Tensors(bool)> compute) {
  const Tensors jvp = run_jvp(call);
  const Operator& op = *call.op;
  const size_t count = op.results.size();
  Tensors results(jvp.begin(), jvp.begin() + count);
  const auto node = node_of(call);
  if (node || results[0].key_set().has(c10::DispatchKey::Batched))
    results = below_autograd(compute, /*has_node=*/true);
  set_history(op, node, results);
  for (size_t i = 0; i < count; ++i)
    if (results[i].defined() && jvp[count + i].defined())
      results[i]._set_fw_grad(jvp[count + i], kLevel, /*is_inplace_op=*/false);
  return results;
}

}  // namespace

void refuse_gradients(const Call& call) {
  if (!call.op->kernels.no_gradient || !at::GradMode::is_enabled()) return;
  for (const Parameter& p : call.op->parameters) {
    const bool has = p.is_tensor && call.has(Argument(p.which));
    TORCH_CHECK(!has || !call[Argument(p.which)].requires_grad(), call.title(), ": ", p.name,
                " requires grad, but this is for inference only, it has no gradient; ",
                call.op->kernels.no_gradient);
  }
}

Tensors differentiate(const Call& call, c10::function_ref<Tensors(bool)> compute) {
  if (carries_tangents(call))
    return call.op->kernels.jvp ? differentiate_forward(call, compute) : compose_tangents(call);
  refuse_gradients(call);
  const Operator& op = *call.op;
  const auto node = node_of(call);
  Tensors results = below_autograd(compute, node != nullptr);
  set_history(op, node, results);
  return results;
}

void kernel(const Operator& op, c10::DispatchKeySet keys, boxed::Stack& stack) {
  const Call call = boxed::call_of(op, stack);
  check_python_tensors(call);
  bool is_redispatched = false;
  Tensors results = differentiate(call, [&](bool) {
    // This takes the arguments off the stack: nothing of the call is looked at after it.
    is_redispatched = true;
    op.handle().redispatchBoxed(keys & c10::after_autograd_keyset, &stack);
    return boxed::pop_results(op, stack);
  });
  if (!is_redispatched) return boxed::replace(op, stack, std::move(results));
  for (at::Tensor& result : results) stack.emplace_back(std::move(result));
}

}  // namespace qkv::autograd
