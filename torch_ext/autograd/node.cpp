#include "autograd/node.h"

#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/dynamo/compiled_autograd.h>

#include <algorithm>
#include <map>
#include <mutex>

#include "autograd/run.h"
#include "dispatch/dispatch.h"

namespace qkv::autograd {
namespace {

using torch::autograd::SavedVariable;
using torch::autograd::variable_list;
using torch::dynamo::autograd::IValuePacker;
using torch::dynamo::autograd::PackedArgs;

// What a backward operator returns are gradients: none of them is an argument of another operator.
bool returns(const Operator& forward, Argument argument) {
  return !forward.is_backward &&
         std::count(forward.results.begin(), forward.results.end(), argument) > 0;
}

// The results of `forward` whose gradients `backward` takes, in the order of the Node's inputs.
template <class Visit>
void for_each_differentiable_result(const Operator& forward, const Operator& backward,
                                    const Visit& visit) {
  for (size_t i = 0; i < forward.results.size(); ++i) {
    const Argument gradient = forward.incoming_of(forward.results[i]);
    if (gradient != arg::count && backward.takes(gradient)) visit(i, gradient);
  }
}

// The tensors that a Node saves for `backward`: all of its tensors but the incoming gradients.
template <class Visit>
void for_each_saved(const Operator& backward, const Visit& visit) {
  for (size_t i = backward.incoming; i < backward.parameters.size(); ++i)
    if (backward.parameters[i].is_tensor) visit(Argument(backward.parameters[i].which));
}

// Calls visit with every option that `op` takes, as values that compiled autograd knows.
template <class AnyOptions, class Visit>
void for_each_option(const Operator& op, AnyOptions& options, const Visit& visit) {
  for (const Parameter& p : op.parameters)
    if (!p.is_tensor)
      visit_option(options, Option(p.which), [&](auto& option) {
        using T = std::decay_t<decltype(option)>;
        if constexpr (std::is_same_v<T, Window>) {
          visit(option.left), visit(option.right);
        } else if constexpr (std::is_same_v<T, ShardNumbers>) {
          for (auto& number : option.all) visit(number);
        } else if constexpr (std::is_enum_v<T>) {
          int64_t number = int64_t(option);
          visit(number);
          if constexpr (!std::is_const_v<std::remove_reference_t<decltype(option)>>)
            option = T(number);
        } else {
          visit(option);
        }
      });
}

// The options of a call with `scores` said, where a setting decides how they are made: it may be
// another one when the backward pass runs.
Options with_scores(const Call& call) {
  Options said = call.options;
  if (call.op->takes(opt::scores) && said.scores == Scores::automatic &&
      call[arg::query].scalar_type() == at::kBFloat16)
    said.scores = multiplies_pairs(DType::bf16) ? Scores::pairs : Scores::elements;
  return said;
}

variable_list gradients(const Operator& forward, const Operator& backward,
                        const variable_list& grads, const BackwardInputs& inputs) {
  variable_list results(backward.results.size());
  if (std::none_of(grads.begin(), grads.end(), [](const auto& g) { return g.defined(); }))
    return results;
  Call call(backward);
  call.options = inputs.options;
  call.output_mask = inputs.output_mask;
  size_t input = 0;
  for_each_differentiable_result(
      forward, backward, [&](size_t, Argument gradient) { call.set(gradient, grads[input++]); });
  auto saved = inputs.saved.begin();
  for_each_saved(backward, [&](Argument argument) { call.set(argument, *saved++); });
  Tensors computed = run(call);
  std::move(computed.begin(), computed.end(), results.begin());
  return results;
}

// What compiled autograd records of a Node, as one list of values, and back.
PackedArgs packed(const Operator& backward, BackwardInputs& inputs) {
  PackedArgs args;
  for (const at::Tensor& tensor : inputs.saved) args.pack(tensor);
  for_each_option(backward, inputs.options, [&](const auto& value) { args.pack(value); });
  args.pack(inputs.output_mask.bits());
  return args;
}

BackwardInputs unpacked(const Operator& backward, const std::vector<c10::IValue>& values) {
  PackedArgs args(values);
  BackwardInputs inputs;
  for_each_saved(backward, [&](Argument) { inputs.saved.push_back(args.unpack<at::Tensor>()); });
  for_each_option(backward, inputs.options,
                  [&](auto& value) { value = args.unpack<std::decay_t<decltype(value)>>(); });
  inputs.output_mask = ArgumentSet::from(args.unpack<int64_t>());
  return inputs;
}

std::vector<at::TypePtr> packed_types(const Operator& backward) {
  std::vector<at::TypePtr> types;
  for_each_saved(backward,
                 [&](Argument) { types.push_back(IValuePacker<at::Tensor>::packed_type()); });
  const Options options;
  for_each_option(backward, options, [&](const auto& value) {
    types.push_back(IValuePacker<std::decay_t<decltype(value)>>::packed_type());
  });
  types.push_back(IValuePacker<int64_t>::packed_type());
  return types;
}

}  // namespace

c10::intrusive_ptr<OperatorNode> OperatorNode::of(const Call& call) {
  const Operator& op = *call.op;
  const auto depends = [&](Argument argument) {
    return call.has(argument) && call[argument].requires_grad() && call.differentiates(argument);
  };
  const auto& all = op.backward->results;
  if (std::none_of(all.begin(), all.end(), depends)) return {};
  return c10::make_intrusive<OperatorNode>(call);
}

OperatorNode::OperatorNode(const Call& call)
    : forward_(*call.op), backward_(*call.op->backward), options_(with_scores(call)) {
  torch::autograd::edge_list edges;
  edges.reserve(backward_.results.size());
  for (const Argument argument : backward_.results)
    edges.push_back(call.has(argument) && call.differentiates(argument)
                        ? torch::autograd::impl::gradient_edge(call[argument])
                        : torch::autograd::Edge());
  set_next_edges(std::move(edges));
  saved_.reserve(backward_.parameters.size());
  for_each_saved(backward_, [&](Argument argument) {
    if (call.has(argument) && !returns(forward_, argument)) {
      saved_.emplace_back(call[argument], /*is_output=*/false);
    } else {
      saved_.emplace_back();
    }
  });
}

void OperatorNode::set_results(const Tensors& results) {
  const auto self = getptr();
  for_each_differentiable_result(forward_, backward_, [&](size_t i, Argument) {
    torch::autograd::set_history(results[i], self);
  });
  size_t at = 0;
  for_each_saved(backward_, [&](Argument argument) {
    const auto found = std::find(forward_.results.begin(), forward_.results.end(), argument);
    if (returns(forward_, argument))
      saved_[at] = SavedVariable(results[found - forward_.results.begin()], /*is_output=*/true);
    ++at;
  });
}

std::string OperatorNode::name() const {
  const std::string words = forward_.is_backward ? forward_.name : forward_.title;
  std::string name;
  for (size_t i = 0; i < words.size(); ++i)
    if (words[i] != '_')
      name += i == 0 || words[i - 1] == '_' ? char(std::toupper(words[i])) : words[i];
  return name + "Backward";
}

BackwardInputs OperatorNode::inputs() {
  BackwardInputs inputs{{}, options_, {}};
  auto saved = saved_.begin();
  for_each_saved(backward_, [&](Argument argument) {
    inputs.saved.push_back(returns(forward_, argument) ? saved->unpack(getptr()) : saved->unpack());
    ++saved;
  });
  for (size_t i = 0; i < backward_.results.size(); ++i)
    inputs.output_mask.set(backward_.results[i], task_should_compute_output(i));
  return inputs;
}

variable_list OperatorNode::apply(variable_list&& grads) {
  std::lock_guard<std::mutex> lock(mutex_);
  return gradients(forward_, backward_, grads, inputs());
}

void OperatorNode::release_variables() {
  std::lock_guard<std::mutex> lock(mutex_);
  for (SavedVariable& saved : saved_) saved.reset_data();
}

void OperatorNode::compiled_args(torch::dynamo::autograd::CompiledNodeArgs& args) const {
  auto saved = saved_.begin();
  for_each_saved(backward_,
                 [&](Argument argument) { args.collect(*saved++, returns(forward_, argument)); });
  for_each_option(backward_, options_, [&](const auto& value) { args.collect(value); });
}

variable_list OperatorNode::apply_with_saved(const variable_list& grads,
                                             torch::dynamo::autograd::SwapSavedVariables& swap) {
  const auto for_each_swapped = [&](const auto& visit) {
    for (SavedVariable& saved : saved_) visit(saved);
    for_each_option(backward_, options_, [&](auto& value) {
      if constexpr (std::is_same_v<std::decay_t<decltype(value)>, c10::SymInt>) visit(value);
    });
  };
  for_each_swapped([&](auto& value) { swap.before(value); });
  BackwardInputs own = inputs();
  PackedArgs args = packed(backward_, own);
  const auto metadata = torch::dynamo::autograd::get_input_metadata(next_edges());
  auto result = torch::dynamo::autograd::getPyCompilerInterface()->call_function(
      swap.get_py_compiler(), "apply_functional", compiled_function(swap.get_py_compiler()), grads,
      args.vec(),
      IValuePacker<std::vector<std::optional<torch::autograd::InputMetadata>>>::pack(metadata));
  for_each_swapped([&](auto& value) { swap.after(value); });
  return result;
}

// The name under which compiled autograd knows the backward pass. It may be bound only once.
const std::string& OperatorNode::compiled_function(PyObject* compiler) const {
  static std::mutex mutex;
  static std::map<const Operator*, std::string> names;
  std::lock_guard<std::mutex> lock(mutex);
  std::string& bound = names[&forward_];
  if (bound.empty())
    bound = torch::dynamo::autograd::getPyCompilerInterface()->bind_function(
        compiler, name(),
        [&forward = forward_, &backward = backward_](const variable_list& grads,
                                                     const std::vector<c10::IValue>& values) {
          return gradients(forward, backward, grads, unpacked(backward, values));
        },
        packed_types(backward_));
  return bound;
}

}  // namespace qkv::autograd
