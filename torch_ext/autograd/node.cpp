#include "autograd/node.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/dynamo/compiled_autograd.h>

#include <algorithm>
#include <map>
#include <mutex>

#include "autograd/compose.h"
#include "autograd/run.h"
#include "call/boxed.h"
#include "dispatch/dispatch.h"

namespace qkv::autograd {
namespace {

using torch::autograd::SavedVariable;
using torch::autograd::variable_list;

// Which result of `forward` an argument of its backward operator is; -1: none. What a backward
// operator returns are gradients, of which none is an argument of another operator.
int result_number(const Operator& forward, Argument argument) {
  const auto begin = forward.results.begin(), end = forward.results.end();
  const auto found = std::find(begin, end, argument);
  return forward.is_backward || found == end ? -1 : int(found - begin);
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

// Calls visit with every option that `op` takes, as values that compiled autograd knows.
template <class AnyOptions, class Visit>
void for_each_value(const Operator& op, AnyOptions& options, const Visit& visit) {
  for (const Parameter& p : op.parameters)
    if (!p.is_tensor)
      visit_option(options, Option(p.which), [&](auto& option) {
        using T = std::decay_t<decltype(option)>;
        if constexpr (std::is_same_v<T, Window>) {
          visit(option.left), visit(option.right);
        } else if constexpr (std::is_same_v<T, ShardNumbers>) {
          for (auto& number : option.all) visit(number);
        } else if constexpr (std::is_enum_v<T>) {
          visit(int64_t(option));
        } else {
          visit(option);
        }
      });
}

// The options of a call with `scores` said, where a setting decides how they are made: it may be
// another one when the backward pass runs.
Options with_scores(const Call& call) {
  Options said = call.options;
  if (!call.op->takes(opt::scores) || said.scores != ScoreWay::automatic) return said;
  const bool pairs =
      call[arg::query].scalar_type() == at::kBFloat16 && multiplies_pairs(DType::bf16);
  said.scores = reproducible() ? ScoreWay::fixed : pairs ? ScoreWay::pairs : ScoreWay::elements;
  return said;
}

// What `call`, of a backward operator, returns when the results have these gradients.
variable_list gradients(Call&& call, const variable_list& grads) {
  variable_list results(call.op->results.size());
  if (std::none_of(grads.begin(), grads.end(), [](const auto& g) { return g.defined(); }))
    return results;
  size_t input = 0;
  for_each_differentiable_result(
      *call.op->differentiated, *call.op,
      [&](size_t, Argument gradient) { call.set(gradient, grads[input++]); });
  Tensors computed = run(call);
  std::move(computed.begin(), computed.end(), results.begin());
  return results;
}

// What a Node saves of an argument.
at::Tensor kept_of(const Call& call, Argument argument) {
  const at::Tensor& tensor = call[argument];
  const auto reads = call.op->kernels.reads;
  const bool is_read = !reads || reads(call, argument);
  // torch saves nothing that was made in inference mode. Of numbers without a gradient, such as a
  // boolean mask, a copy serves.
  if (is_read)
    return tensor.is_inference() && !tensor.is_floating_point() ? tensor.clone() : tensor;
  return at::zeros({}, tensor.options()).expand_symint(tensor.sym_sizes());
}

}  // namespace

c10::intrusive_ptr<OperatorNode> OperatorNode::make(const Call& call) {
  const auto depends = [&](Argument argument) {
    return call.has(argument) && call[argument].requires_grad() && call.differentiates(argument);
  };
  const auto& all = call.op->differentiable;
  if (std::none_of(all.begin(), all.end(), depends)) return {};
  return c10::make_intrusive<OperatorNode>(call);
}

OperatorNode::OperatorNode(const Call& call)
    : forward_(*call.op),
      op_(forward_.backward ? *forward_.backward : forward_),
      options_(with_scores(call)),
      output_mask_(call.output_mask) {
  torch::autograd::edge_list edges;
  edges.reserve(forward_.differentiable.size());
  for (const Argument argument : forward_.differentiable)
    edges.push_back(call.has(argument) && call.differentiates(argument)
                        ? torch::autograd::impl::gradient_edge(call[argument])
                        : torch::autograd::Edge());
  set_next_edges(std::move(edges));
  saved_.reserve(op_.parameters.size());
  for (size_t i = is_composed() ? 0 : op_.incoming; i < op_.parameters.size(); ++i) {
    if (!op_.parameters[i].is_tensor) continue;
    const auto argument = Argument(op_.parameters[i].which);
    Saved& saved = saved_.emplace_back();
    saved.argument = argument;
    saved.result = result_number(forward_, argument);
    if (call.has(argument) && saved.result < 0)
      saved.variable = SavedVariable(kept_of(call, argument), /*is_output=*/false);
  }
}

void OperatorNode::set_results(const Tensors& results) {
  const auto self = getptr();
  for_each_differentiable_result(
      forward_, op_, [&](size_t i, Argument) { torch::autograd::set_history(results[i], self); });
  for (Saved& saved : saved_)
    if (saved.result >= 0)
      saved.variable = SavedVariable(results[saved.result], /*is_output=*/true);
}

std::string OperatorNode::name() const {
  if (is_composed()) return forward_.name + "_composition";
  const std::string words = forward_.is_backward ? forward_.name : forward_.title;
  std::string name;
  for (size_t i = 0; i < words.size(); ++i)
    if (words[i] != '_')
      name += i == 0 || words[i - 1] == '_' ? char(std::toupper(words[i])) : words[i];
  return name + "Backward";
}

ArgumentSet OperatorNode::wanted() {
  ArgumentSet wanted;
  for (size_t i = 0; i < forward_.differentiable.size(); ++i)
    wanted.set(forward_.differentiable[i], task_should_compute_output(i));
  return wanted;
}

Call OperatorNode::saved_call(c10::SmallVectorImpl<at::Tensor>& tensors) {
  Call call(op_);
  call.options = options_;
  call.output_mask = is_composed() ? output_mask_ : wanted();
  tensors.reserve(saved_.size());  // the call points to its elements
  for (Saved& saved : saved_) {
    tensors.push_back(saved.variable.unpack(saved.result >= 0 ? getptr() : nullptr));
    call.set(saved.argument, tensors.back());
  }
  return call;
}

variable_list OperatorNode::apply(variable_list&& grads) {
  std::lock_guard<std::mutex> lock(mutex_);
  c10::SmallVector<at::Tensor, 16> tensors;
  Call call = saved_call(tensors);
  if (!is_composed()) return gradients(std::move(call), grads);
  const Gradients found = composed_gradients(std::move(call), wanted(), grads);
  variable_list results;
  for (const Argument argument : forward_.differentiable) results.push_back(found[argument]);
  return results;
}

void OperatorNode::release_variables() {
  std::lock_guard<std::mutex> lock(mutex_);
  for (Saved& saved : saved_) saved.variable.reset_data();
}

void OperatorNode::compiled_args(torch::dynamo::autograd::CompiledNodeArgs& args) const {
  if (is_composed()) return Node::compiled_args(args);  // throws: it is not implemented
  for (const Saved& saved : saved_) args.collect(saved.variable, saved.result >= 0);
  for_each_value(op_, options_, [&](const auto& value) { args.collect(value); });
}

// Compiled autograd records what the dispatcher's stack holds for the backward operator; the
// incoming gradients, which it has beside that, are None there.
variable_list OperatorNode::apply_with_saved(const variable_list& grads,
                                             torch::dynamo::autograd::SwapSavedVariables& swap) {
  const auto for_each_swapped = [&](const auto& visit) {
    for (Saved& saved : saved_) visit(saved.variable);
    for_each_value(op_, options_, [&](auto&& value) {
      if constexpr (std::is_same_v<std::decay_t<decltype(value)>, c10::SymInt>) visit(value);
    });
  };
  for_each_swapped([&](auto& value) { swap.before(value); });
  c10::SmallVector<at::Tensor, 16> tensors;
  boxed::Stack stack;
  boxed::push(stack, saved_call(tensors));
  const auto metadata = torch::dynamo::autograd::get_input_metadata(next_edges());
  auto result = torch::dynamo::autograd::getPyCompilerInterface()->call_function(
      swap.get_py_compiler(), "apply_functional", compiled_function(swap.get_py_compiler()), grads,
      stack,
      torch::dynamo::autograd::IValuePacker<
          std::vector<std::optional<torch::autograd::InputMetadata>>>::pack(metadata));
  for_each_swapped([&](auto& value) { swap.after(value); });
  return result;
}

// The name under which compiled autograd knows the backward pass. It may be bound only once.
const std::string& OperatorNode::compiled_function(PyObject* compiler) const {
  static std::mutex mutex;
  static std::map<const Operator*, std::string> names;
  std::lock_guard<std::mutex> lock(mutex);
  std::string& bound = names[&op_];
  if (!bound.empty()) return bound;
  std::vector<at::TypePtr> types;
  for (const c10::Argument& argument : op_.handle().schema().arguments())
    types.push_back(argument.real_type());
  return bound = torch::dynamo::autograd::getPyCompilerInterface()->bind_function(
             compiler, name(),
             [&backward = op_](const variable_list& grads, const boxed::Stack& stack) {
               return gradients(boxed::call_of(backward, stack), grads);
             },
             types);
}

}  // namespace qkv::autograd
