// Dispatch key Autograd: C++ Nodes, as torch's generated code has them. Unlike
// torch::autograd::Function they work under torch.func and compiled autograd.
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/basic_ops.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/dynamo/compiled_autograd.h>
#include <torch/library.h>

#include "check.h"

namespace qkv {
namespace {

using torch::autograd::SavedVariable;
using torch::autograd::variable_list;
using torch::dynamo::autograd::CompiledNodeArgs;
using torch::dynamo::autograd::IValuePacker;
using torch::dynamo::autograd::PackedArgs;
using torch::dynamo::autograd::SwapSavedVariables;

OptionalTensor optional(const at::Tensor& tensor) {
  return tensor.defined() ? OptionalTensor(tensor) : std::nullopt;
}

// What the backward pass needs besides the incoming gradients. Unpacked
// tensors in the Node; proxies when compiled autograd traces it.
struct Context {
  at::Tensor query, key, value, attn_mask, output, lse;
  AttentionOptions options;  // without attn_mask
  std::array<bool, 3> output_mask;
};

variable_list backward(const variable_list& grads, const Context& c) {
  const OptionalTensor grad_output = optional(grads[0]), grad_lse = optional(grads[1]);
  if (!grad_output && !grad_lse) return variable_list(3);
  AttentionOptions options = c.options;
  options.attn_mask(optional(c.attn_mask));
  auto [query, key, value] = ops::attention_backward(
      {grad_output, grad_lse, {c.query, c.key, c.value, options}, c.output, c.lse, c.output_mask});
  return {std::move(query), std::move(key), std::move(value)};
}

// The same for compiled autograd, which passes the Context as a list of values.
variable_list backward_from_values(const variable_list& grads,
                                   const std::vector<c10::IValue>& values) {
  PackedArgs args(values);
  Context c;
  for (at::Tensor* t : {&c.query, &c.key, &c.value, &c.attn_mask, &c.output, &c.lse})
    *t = args.unpack<at::Tensor>();
  c.options.dropout_p(args.unpack<double>());
  c.options.is_causal(args.unpack<bool>());
  c.options.scale(args.unpack<std::optional<double>>());
  c.options.enable_gqa(args.unpack<bool>());
  const auto wanted = args.unpack<std::vector<bool>>();
  std::copy(wanted.begin(), wanted.end(), c.output_mask.begin());
  return backward(grads, c);
}

struct AttentionBackward : public torch::autograd::TraceableFunction {
  SavedVariable query, key, value, attn_mask, output, lse;
  AttentionOptions options;  // without attn_mask

  std::string name() const override { return "AttentionBackward"; }

  variable_list apply(variable_list&& grads) override {
    std::lock_guard<std::mutex> lock(mutex_);
    return backward(grads, context());
  }

  void release_variables() override {
    std::lock_guard<std::mutex> lock(mutex_);
    for (SavedVariable* saved : variables()) saved->reset_data();
  }

  void compiled_args(CompiledNodeArgs& args) const override {
    for (const SavedVariable* saved : {&query, &key, &value, &attn_mask})
      args.collect(*saved, /*is_output=*/false);
    for (const SavedVariable* saved : {&output, &lse}) args.collect(*saved, /*is_output=*/true);
    args.collect(options.dropout_p());
    args.collect(options.is_causal());
    args.collect(options.scale());
    args.collect(options.enable_gqa());
  }

  variable_list apply_with_saved(const variable_list& grads, SwapSavedVariables& saved) override {
    for (SavedVariable* variable : variables()) saved.before(*variable);
    const Context c = context();
    PackedArgs args;
    for (const at::Tensor& t : {c.query, c.key, c.value, c.attn_mask, c.output, c.lse})
      args.pack(t);
    args.pack(options.dropout_p());
    args.pack(options.is_causal());
    args.pack(options.scale());
    args.pack(options.enable_gqa());
    args.pack(c.output_mask);
    const auto metadata = torch::dynamo::autograd::get_input_metadata(next_edges());
    const auto& compiler = torch::dynamo::autograd::getPyCompilerInterface();
    static const std::string function =
        compiler->bind_function(saved.get_py_compiler(), name(), backward_from_values, schema());
    auto result = compiler->call_function(
        saved.get_py_compiler(), "apply_functional", function, grads, args.vec(),
        IValuePacker<std::vector<std::optional<torch::autograd::InputMetadata>>>::pack(metadata));
    for (SavedVariable* variable : variables()) saved.after(*variable);
    return result;
  }

 private:
  std::array<SavedVariable*, 6> variables() {
    return {&query, &key, &value, &attn_mask, &output, &lse};
  }

  Context context() {
    Context c{query.unpack(),          key.unpack(),         value.unpack(), attn_mask.unpack(),
              output.unpack(getptr()), lse.unpack(getptr()), options,        {}};
    for (size_t i = 0; i < c.output_mask.size(); ++i)
      c.output_mask[i] = task_should_compute_output(i);
    return c;
  }

  static std::vector<at::TypePtr> schema() {
    const auto tensor = IValuePacker<at::Tensor>::packed_type();
    return {tensor,
            tensor,
            tensor,
            tensor,
            tensor,
            tensor,
            IValuePacker<double>::packed_type(),
            IValuePacker<bool>::packed_type(),
            IValuePacker<std::optional<double>>::packed_type(),
            IValuePacker<bool>::packed_type(),
            IValuePacker<std::array<bool, 3>>::packed_type()};
  }
};

bool has_tangent(const at::Tensor& tensor) {
  return tensor.defined() && tensor._fw_grad(/*level=*/0).defined();
}

// Without this, forward-mode derivatives would come out as zero.
template <class... Tensors>
void refuse_tangents(const char* op, const Tensors&... tensors) {
  TORCH_CHECK_NOT_IMPLEMENTED(!(has_tangent(tensors) || ...), op,
                              ": forward-mode derivatives (jvp) are not implemented yet");
}

void check_mask(const OptionalTensor& mask) {
  if (!mask) return;
  TORCH_CHECK_NOT_IMPLEMENTED(
      !(mask->requires_grad() && at::GradMode::is_enabled()),
      "attention: attn_mask requires grad, but the gradient of attn_mask is not implemented yet; "
      "pass attn_mask.detach()");
  refuse_tangents("attention", *mask);
}

OutputAndLse forward_autograd(c10::DispatchKeySet keys, const Forward& call) {
  check_tensors(call);
  check_supported(call);
  refuse_tangents("attention", call.query, call.key, call.value);
  check_mask(call.options.attn_mask());
  c10::intrusive_ptr<AttentionBackward> node;
  if (torch::autograd::compute_requires_grad(call.query, call.key, call.value)) {
    node = c10::make_intrusive<AttentionBackward>();
    node->set_next_edges(torch::autograd::collect_next_edges(call.query, call.key, call.value));
    node->query = SavedVariable(call.query, false);
    node->key = SavedVariable(call.key, false);
    node->value = SavedVariable(call.value, false);
    node->attn_mask = SavedVariable(call.options.attn_mask(), false);
    node->options = call.options;
    node->options.attn_mask(std::nullopt);
  }
  auto [output, lse] = [&] {
    at::AutoDispatchBelowADInplaceOrView guard;
    return ops::attention_with_lse(keys & c10::after_autograd_keyset, call);
  }();
  if (node) {
    torch::autograd::set_history(output, node);
    torch::autograd::set_history(lse, node);
    node->output = SavedVariable(output, true);
    node->lse = SavedVariable(lse, true);
  }
  return {std::move(output), std::move(lse)};
}

// The error comes when a second derivative is asked for, not before:
// torch.func.grad builds the graph for one whether it is needed or not.
Gradients backward_autograd(c10::DispatchKeySet keys, const Backward& call) {
  const Forward& f = call.forward;
  const at::Tensor grad_output = call.grad_output.value_or(at::Tensor());
  const at::Tensor grad_lse = call.grad_lse.value_or(at::Tensor());
  refuse_tangents("attention_backward", grad_output, grad_lse, f.query, f.key, f.value, call.output,
                  call.lse);
  c10::intrusive_ptr<torch::autograd::Node> node;
  if (torch::autograd::compute_requires_grad(grad_output, grad_lse, f.query, f.key, f.value,
                                             call.output, call.lse)) {
    node = c10::make_intrusive<torch::autograd::Error>(
        "attention_backward: second derivatives are not implemented yet",
        torch::autograd::collect_next_edges(grad_output, grad_lse, f.query, f.key, f.value,
                                            call.output, call.lse));
  }
  auto gradients = [&] {
    at::AutoDispatchBelowADInplaceOrView guard;
    return ops::attention_backward(keys & c10::after_autograd_keyset, call);
  }();
  if (node) {
    torch::autograd::set_history(std::get<0>(gradients), node);
    torch::autograd::set_history(std::get<1>(gradients), node);
    torch::autograd::set_history(std::get<2>(gradients), node);
  }
  return gradients;
}

}  // namespace

TORCH_LIBRARY_IMPL(qkv, Autograd, m) {
  m.impl("attention_with_lse", ops::forward_with_keys<&forward_autograd>);
  m.impl("attention_backward", ops::backward_with_keys<&backward_autograd>);
}

}  // namespace qkv
