// What the operators' autograd Nodes share. C++ Nodes, as torch's generated code has them: unlike
// torch::autograd::Function they work under torch.func and compiled autograd.
#pragma once

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/dynamo/compiled_autograd.h>

#include "call.h"

namespace qkv::autograd {

using torch::autograd::SavedVariable;
using torch::autograd::variable_list;
using torch::dynamo::autograd::CompiledNodeArgs;
using torch::dynamo::autograd::IValuePacker;
using torch::dynamo::autograd::PackedArgs;
using torch::dynamo::autograd::SwapSavedVariables;

constexpr int kResults = 2;

// What a backward pass needs besides the incoming gradients: tensors in a Node, proxies when
// compiled autograd traces it. Not used by all operators: what has not been set.
struct Context {
  std::array<at::Tensor, kArguments> arguments;
  std::array<at::Tensor, kResults> results;
  Options options;
  int64_t variant = 0;  // of the operator; what it means is up to the Op
  OutputMask output_mask;

  Forward forward(const char* op) const {
    Forward call{op, {}, options};
    for (int i = 0; i < kArguments; ++i) call.tensors[i] = &arguments[i];
    return call;
  }
};

// Calls field() with each field that is no tensor: compiled autograd passes a Context as a list of
// values, tensors first.
template <class Field>
void for_each_option(Options& options, int64_t& variant, const Field& field) {
  field(options.dropout_p);
  field(options.is_causal);
  field(options.scale);
  field(options.enable_gqa);
  for (c10::SymInt& size : options.window_size) field(size);
  field(options.softcap);
  field(variant);
}

using TensorList = c10::ArrayRef<const at::Tensor*>;  // undefined: None

// The first kDifferentiable arguments, or None for those that an operator has no gradient for.
using DifferentiableTensors = std::array<const at::Tensor*, kDifferentiable>;

inline DifferentiableTensors differentiable(const Forward& call) {
  DifferentiableTensors tensors;
  std::copy_n(call.tensors.begin(), kDifferentiable, tensors.begin());
  return tensors;
}

inline variable_list list_of(Gradients&& gradients) {
  return std::apply([](auto&&... g) { return variable_list{std::move(g)...}; },
                    std::move(gradients));
}

inline torch::autograd::edge_list edges_of(TensorList tensors) {
  torch::autograd::edge_list edges(tensors.size());
  for (size_t i = 0; i < tensors.size(); ++i)
    if (tensors[i]->defined()) edges[i] = torch::autograd::impl::gradient_edge(*tensors[i]);
  return edges;
}

// The Node of an operator. Op has
//   static constexpr const char* kName;
//   static variable_list backward(const variable_list& grads, const Context&);
// which returns the gradients of the first kDifferentiable arguments.
template <class Op>
class OpNode : public torch::autograd::TraceableFunction {
 public:
  OpNode(const Forward& call, int64_t variant, const DifferentiableTensors& differentiable)
      : options_(call.options), variant_(variant) {
    set_next_edges(edges_of(differentiable));
    for (int i = 0; i < kArguments; ++i)
      if (call.tensors[i]->defined()) arguments_[i] = SavedVariable(*call.tensors[i], false);
  }

  void save_result(int i, const at::Tensor& result) { results_[i] = SavedVariable(result, true); }

  std::string name() const override { return Op::kName; }

  variable_list apply(variable_list&& grads) override {
    std::lock_guard<std::mutex> lock(mutex_);
    return Op::backward(grads, context());
  }

  void release_variables() override {
    std::lock_guard<std::mutex> lock(mutex_);
    for (SavedVariable& saved : arguments_) saved.reset_data();
    for (SavedVariable& saved : results_) saved.reset_data();
  }

  void compiled_args(CompiledNodeArgs& args) const override {
    for (const SavedVariable& saved : arguments_) args.collect(saved, /*is_output=*/false);
    for (const SavedVariable& saved : results_) args.collect(saved, /*is_output=*/true);
    Options options = options_;
    int64_t variant = variant_;
    for_each_option(options, variant, [&](const auto& field) { args.collect(field); });
  }

  variable_list apply_with_saved(const variable_list& grads, SwapSavedVariables& saved) override {
    saved_for_each([&](auto& field) { saved.before(field); });
    Context c = context();
    PackedArgs args;
    for (const at::Tensor& t : c.arguments) args.pack(t);
    for (const at::Tensor& t : c.results) args.pack(t);
    for_each_option(c.options, c.variant, [&](const auto& field) { args.pack(field); });
    args.pack(c.output_mask);
    const auto metadata = torch::dynamo::autograd::get_input_metadata(next_edges());
    const auto& compiler = torch::dynamo::autograd::getPyCompilerInterface();
    static const std::string function =
        compiler->bind_function(saved.get_py_compiler(), name(), backward_from_values, schema());
    auto result = compiler->call_function(
        saved.get_py_compiler(), "apply_functional", function, grads, args.vec(),
        IValuePacker<std::vector<std::optional<torch::autograd::InputMetadata>>>::pack(metadata));
    saved_for_each([&](auto& field) { saved.after(field); });
    return result;
  }

 private:
  template <class Field>
  void saved_for_each(const Field& field) {
    for (SavedVariable& saved : arguments_) field(saved);
    for (SavedVariable& saved : results_) field(saved);
    for (c10::SymInt& size : options_.window_size) field(size);
  }

  Context context() {
    Context c{{}, {}, options_, variant_, {}};
    for (int i = 0; i < kArguments; ++i) c.arguments[i] = arguments_[i].unpack();
    for (int i = 0; i < kResults; ++i) c.results[i] = results_[i].unpack(getptr());
    for (int i = 0; i < kDifferentiable; ++i) c.output_mask[i] = task_should_compute_output(i);
    return c;
  }

  static variable_list backward_from_values(const variable_list& grads,
                                            const std::vector<c10::IValue>& values) {
    PackedArgs args(values);
    Context c;
    for (at::Tensor& t : c.arguments) t = args.unpack<at::Tensor>();
    for (at::Tensor& t : c.results) t = args.unpack<at::Tensor>();
    for_each_option(c.options, c.variant,
                    [&](auto& field) { field = args.unpack<std::decay_t<decltype(field)>>(); });
    c.output_mask = args.unpack<OutputMask>();
    return Op::backward(grads, c);
  }

  static std::vector<at::TypePtr> schema() {
    std::vector<at::TypePtr> types(kArguments + kResults, IValuePacker<at::Tensor>::packed_type());
    Context c;
    for_each_option(c.options, c.variant, [&](auto& field) {
      types.push_back(IValuePacker<std::decay_t<decltype(field)>>::packed_type());
    });
    types.push_back(IValuePacker<OutputMask>::packed_type());
    return types;
  }

  std::array<SavedVariable, kArguments> arguments_;
  std::array<SavedVariable, kResults> results_;
  Options options_;
  int64_t variant_;
};

}  // namespace qkv::autograd
