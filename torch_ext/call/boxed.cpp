#include "call/boxed.h"

#include "call/after_fork.h"
#include "call/values.h"

namespace qkv::boxed {
namespace {

size_t argument_count(const Operator& op) { return op.parameters.size() + op.is_backward; }

template <class F>
struct Kernel : c10::OperatorKernel {
  explicit Kernel(F f) : f(std::move(f)) {}
  void operator()(const c10::OperatorHandle&, c10::DispatchKeySet keys, Stack* stack) {
    f(keys, *stack);
  }
  F f;
};

template <class F>
torch::CppFunction kernel_of(F f) {
  return torch::CppFunction::makeFromBoxedFunctor(std::make_unique<Kernel<F>>(std::move(f)));
}

}  // namespace

Call call_of(const Operator& op, const Stack& stack) {
  Call call(op);
  const c10::IValue* value = stack.data() + stack.size() - argument_count(op);
  for (const Parameter& p : op.parameters) {
    if (p.is_tensor) {
      if (!value->isNone()) call.set(Argument(p.which), value->toTensor());
    } else {
      visit_option(call.options, Option(p.which), [&](auto& option) {
        option = Value<std::decay_t<decltype(option)>>::from(*value, op.title);
      });
    }
    ++value;
  }
  if (!op.is_backward) return call;
  const auto wanted = value->toBoolList();
  TORCH_CHECK_VALUE(wanted.size() == op.results.size(), op.name, ": output_mask has ",
                    wanted.size(), " elements, but ", op.results.size(), " are expected");
  for (size_t i = 0; i < op.results.size(); ++i) call.output_mask.set(op.results[i], wanted[i]);
  return call;
}

void push(Stack& stack, const Call& call) {
  const Operator& op = *call.op;
  stack.reserve(stack.size() + argument_count(op));
  for (const Parameter& p : op.parameters) {
    if (!p.is_tensor) {
      stack.push_back(visit_option(call.options, Option(p.which), [](const auto& option) {
        return Value<std::decay_t<decltype(option)>>::to(option);
      }));
    } else if (p.is_required || call.has(Argument(p.which))) {
      stack.emplace_back(call[Argument(p.which)]);
    } else {
      stack.emplace_back();
    }
  }
  if (!op.is_backward) return;
  c10::List<bool> wanted;
  for (const Argument argument : op.results) wanted.push_back(call.output_mask[argument]);
  stack.emplace_back(std::move(wanted));
}

Tensors pop_results(const Operator& op, Stack& stack) {
  Tensors results;
  for (auto value = stack.end() - int64_t(op.results.size()); value != stack.end(); ++value)
    results.push_back(value->isNone() ? at::Tensor() : std::move(*value).toTensor());
  torch::jit::drop(stack, op.results.size());
  return results;
}

void replace(const Operator& op, Stack& stack, Tensors&& results) {
  torch::jit::drop(stack, argument_count(op));
  for (at::Tensor& result : results) stack.emplace_back(std::move(result));
}

torch::CppFunction kernel(const Operator& op, Body body) {
  return kernel_of([&op, body](c10::DispatchKeySet, Stack& stack) {
    const OneThreadAfterFork one_thread;
    replace(op, stack, body(call_of(op, stack)));
  });
}

torch::CppFunction kernel(const Operator& op, BodyWithKeys body) {
  return kernel_of([&op, body](c10::DispatchKeySet keys, Stack& stack) { body(op, keys, stack); });
}

}  // namespace qkv::boxed
